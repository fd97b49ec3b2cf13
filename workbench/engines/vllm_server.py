"""`vllm serve`, and the four prompts sent to it at once.

Tokens go in and come out: the model has no tokenizer.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from workbench.engines import checkpoint

START_SECONDS = 240


def flags(arguments: dict[str, Any]) -> list[str]:
    """The command line's words for arguments of LLM."""
    words = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is False:
            words.append(f"--no-{flag}")
        elif value is True:
            words.append(f"--{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


@contextmanager
def server(folder: str, backend: str, arguments: dict[str, Any]) -> Iterator[str]:
    """The address of a server that answers, and ends afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder, "--tokens-only",
        "--host", "127.0.0.1", "--port", str(port), "--attention-backend", backend,
        "-ac", '{"sparse_mla_force_mqa": true}', *flags(arguments),
    ]  # fmt: skip
    own = {name: x for name, x in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    process = subprocess.Popen(command, env=own)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(f"{address}/health", process)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def wait_for(url: str, process: Any) -> None:
    """Return once it answers.

    Raises:
        RuntimeError: the server ended, or did not answer in time.
    """
    begin = time.monotonic()
    while time.monotonic() - begin < START_SECONDS:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with {process.returncode}")
        try:
            with urlopen(url):
                return
        except (URLError, ConnectionError):
            time.sleep(0.5)
    raise RuntimeError(f"no answer after {START_SECONDS} s")


def ask(address: str, ids: list[int]) -> list[int]:
    """The greedy tokens behind a prompt."""
    sampling = {
        "temperature": 0, "max_tokens": checkpoint.NEW, "min_tokens": checkpoint.NEW,
        "ignore_eos": True, "detokenize": False,
    }  # fmt: skip
    body = json.dumps({"token_ids": ids, "sampling_params": sampling}).encode()
    headers = {"Content-Type": "application/json"}
    with urlopen(Request(f"{address}/inference/v1/generate", body, headers)) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens


def generate(folder: Path, backend: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The server's greedy tokens."""
    begin = time.monotonic()
    with server(str(folder), backend, arguments) as address:
        started = time.monotonic()
        with ThreadPoolExecutor(len(checkpoint.LENGTHS)) as pool:
            tokens = list(pool.map(lambda ids: ask(address, ids), checkpoint.prompts()))
        seconds = time.monotonic() - started
    return {"tokens": tokens, "starts_seconds": started - begin, "seconds": seconds}
