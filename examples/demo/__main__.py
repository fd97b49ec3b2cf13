"""`python -m examples.demo`."""

from examples.demo.command import demo

if __name__ == "__main__":
    demo(prog_name="python -m examples.demo")
