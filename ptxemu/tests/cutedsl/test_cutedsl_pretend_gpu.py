"""Tensors asked for on "cuda" are CPU tensors that behave as if they were not."""

import pytest

from ptxemu import cutedsl
from ptxemu.cutedsl import pretend_gpu

torch = pytest.importorskip("torch", reason="torch is not installed")
is_marked = pytest.importorskip("ptxemu.cutedsl.device_tensors").is_marked


@pytest.fixture
def gpu():
    with pretend_gpu("sm_100a"):
        yield


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device="cuda"),
        lambda: torch.zeros(3).cuda(),
        lambda: torch.zeros(3).to("cuda:0"),
        lambda: torch.zeros(3).to(device="cuda", dtype=torch.bfloat16),
        lambda: torch.zeros_like(torch.ones(3), device=torch.device("cuda", 0)),
        lambda: torch.zeros(3, device="cuda")[1:].view(-1) + 1,
        lambda: torch.zeros(3).to(torch.ones(1, device="cuda")),
        lambda: torch.zeros(4, 3, device="cuda").split(2)[1],
        lambda: torch.nn.Linear(3, 3, device="cuda").weight,
        lambda: torch.nn.Linear(3, 3).cuda().weight,
        lambda: torch.empty(3, device=torch.zeros(1, device="cuda").device),
    ],
)
def test_what_is_made_on_or_from_the_gpu_is_on_the_gpu(gpu, make):
    tensor = make()
    assert tensor.is_cuda and not tensor.is_cpu
    assert tensor.device == torch.device("cuda", 0) and tensor.get_device() == 0
    assert tensor.__dlpack_device__() == (2, 0)


def test_what_is_not_asked_for_on_the_gpu_is_on_the_cpu(gpu):
    assert torch.zeros(3).device.type == "cpu"
    assert (torch.zeros(3, device="cuda") + 1).cpu().device.type == "cpu"
    assert torch.zeros(3, device="cuda").to("cpu").device.type == "cpu"


def test_copies_between_the_devices_copy(gpu):
    there = torch.zeros(3, device="cuda")
    here = there.cpu()
    there += 1
    assert here.tolist() == [0, 0, 0] and there.tolist() == [1, 1, 1]
    assert there.to("cuda") is there
    assert here.to("cpu") is here


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
def test_device_memory_is_aligned_as_a_gpu_allocates_it(gpu, dtype):
    source = torch.arange(24).remainder(9).view(4, 6).T
    kept = [source.to(dtype).cuda() for _ in range(5)] + [source.to("cuda").to(dtype)]
    for tensor in kept:
        assert tensor.untyped_storage().data_ptr() % 512 == 0
        assert tensor.stride() == (1, 6) and tensor.dtype == dtype
        assert torch.equal(tensor.cpu().to(torch.int64), source)


def test_memory_that_autograd_has_saved_stays_on_the_gpu(gpu):
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            result = x.exp()
            ctx.save_for_backward(result)
            return result

        @staticmethod
        def backward(ctx, gradient):
            (saved,) = ctx.saved_tensors
            assert saved.is_cuda and gradient.is_cuda
            assert is_marked(saved) and is_marked(gradient)
            return gradient * saved

    x = torch.zeros(3, device="cuda", requires_grad=True)
    Exp.apply(x).backward(torch.ones(3, device="cuda"))
    assert x.grad.tolist() == [1, 1, 1] and x.grad.is_cuda


def test_host_tensors_stay_host_tensors_for_the_compiler(gpu):
    pytest.importorskip("cutlass.cute", reason="CuTe DSL is not installed")
    from cutlass.cute.runtime import AddressSpace, from_dlpack

    with cutedsl.emulate():
        assert from_dlpack(torch.zeros(4)).memspace == AddressSpace.generic
        assert from_dlpack(torch.zeros(4, device="cuda")).memspace == AddressSpace.gmem


def test_views_and_in_place_operations_share_memory(gpu):
    tensor = torch.zeros(8, device="cuda")
    tensor[2:4].add_(1)
    tensor.view(2, 4)[1] = 2
    assert tensor.tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
    out = torch.empty(8, device="cuda")
    assert torch.add(tensor, 1, out=out).data_ptr() == out.data_ptr()


def test_gradients_flow(gpu):
    leaf = torch.ones(3, device="cuda", requires_grad=True)
    (leaf * 2).sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2] and leaf.grad.is_cuda


def test_the_default_device_can_be_the_gpu(gpu):
    torch.set_default_device("cuda")
    try:
        assert torch.zeros(3).is_cuda
    finally:
        torch.set_default_device(None)
    with torch.device("cuda"):
        assert torch.ones(3).is_cuda


def test_a_custom_operator_for_cuda_runs(gpu):
    @torch.library.custom_op("ptxemu_test::twice", mutates_args=(), device_types="cuda")
    def twice(x: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda
        return x + torch.ones(3, device=x.device)

    assert twice(torch.ones(3, device="cuda")).tolist() == [2, 2, 2]


def test_a_custom_operator_may_have_annotations_that_are_strings(gpu):
    names = {"tensors": torch}
    exec("def thrice(x: 'tensors.Tensor') -> 'tensors.Tensor':\n    return x * 3", names)
    thrice = torch.library.custom_op("ptxemu_test::thrice", names["thrice"], mutates_args=())
    assert thrice(torch.ones(2, device="cuda")).tolist() == [3, 3]


def test_the_state_of_random_numbers_can_be_forked(gpu):
    torch.manual_seed(1)
    state = torch.cuda.get_rng_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        inside = torch.rand(3, device="cuda")
    assert torch.equal(inside, torch.rand(3, device="cuda"))
    torch.cuda.set_rng_state(state)
    assert torch.equal(inside, torch.rand(3, device="cuda"))


def test_torch_and_the_driver_answer_as_the_device(gpu):
    driver = pytest.importorskip("cuda.bindings.driver")
    assert torch.cuda.is_available() and torch.cuda.get_device_capability() == (10, 0)
    assert torch.cuda.get_device_properties(0).multi_processor_count == 148
    assert driver.cuDeviceGetCount() == (driver.CUresult.CUDA_SUCCESS, 1)
    sms = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
    assert driver.cuDeviceGetAttribute(sms, 0)[1] == 148


def test_everything_is_put_back():
    names = ("is_available", "Stream", "synchronize", "current_stream", "get_device_capability")
    before = [getattr(torch.cuda, name) for name in names]
    with pretend_gpu("sm_90a"):
        marked = torch.zeros(3, device="cuda")
    assert [getattr(torch.cuda, name) for name in names] == before
    assert marked.device.type == "cpu" and not marked.is_cuda
    assert not hasattr(torch._C, "_cuda_getCurrentRawStream") or torch.version.cuda
