"""Attributes of the emulated device and its kernels, as host code reads them."""

from __future__ import annotations

from enum import IntEnum

from ptxemu.machine.device import MAX_CTAS, MAX_THREADS, SYSTEM_SHARED_BYTES, Device

SHARED_WITHOUT_OPT_IN = 48 * 1024
_L2_BYTES = {9: 50 * 2**20, 10: 126 * 2**20}
_MEMORY_BYTES = {9: 80 * 2**30, 10: 180 * 2**30}


def memory_bytes(device: Device) -> int:
    """Bytes of the device's memory."""
    return _MEMORY_BYTES[device.capability[0]]


class KernelAttribute(IntEnum):
    """CUfunction_attribute; cudaFuncAttribute has the same numbers where both have a name."""

    MAX_THREADS_PER_BLOCK = 0
    SHARED_SIZE_BYTES = 1
    CONST_SIZE_BYTES = 2
    LOCAL_SIZE_BYTES = 3
    NUM_REGS = 4
    PTX_VERSION = 5
    BINARY_VERSION = 6
    CACHE_MODE_CA = 7
    MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
    PREFERRED_SHARED_MEMORY_CARVEOUT = 9
    CLUSTER_SIZE_MUST_BE_SET = 10
    REQUIRED_CLUSTER_WIDTH = 11
    REQUIRED_CLUSTER_HEIGHT = 12
    REQUIRED_CLUSTER_DEPTH = 13
    NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
    CLUSTER_SCHEDULING_POLICY_PREFERENCE = 15


class DeviceAttribute(IntEnum):
    """CUdevice_attribute; cudaDeviceAttr has the same numbers."""

    MAX_THREADS_PER_BLOCK = 1
    MAX_BLOCK_DIM_X = 2
    MAX_BLOCK_DIM_Y = 3
    MAX_BLOCK_DIM_Z = 4
    MAX_GRID_DIM_X = 5
    MAX_GRID_DIM_Y = 6
    MAX_GRID_DIM_Z = 7
    MAX_SHARED_MEMORY_PER_BLOCK = 8
    TOTAL_CONSTANT_MEMORY = 9
    WARP_SIZE = 10
    MAX_PITCH = 11
    MAX_REGISTERS_PER_BLOCK = 12
    CLOCK_RATE = 13
    MULTIPROCESSOR_COUNT = 16
    INTEGRATED = 18
    COMPUTE_MODE = 20
    CONCURRENT_KERNELS = 31
    MEMORY_CLOCK_RATE = 36
    GLOBAL_MEMORY_BUS_WIDTH = 37
    L2_CACHE_SIZE = 38
    MAX_THREADS_PER_MULTIPROCESSOR = 39
    ASYNC_ENGINE_COUNT = 40
    UNIFIED_ADDRESSING = 41
    COMPUTE_CAPABILITY_MAJOR = 75
    COMPUTE_CAPABILITY_MINOR = 76
    STREAM_PRIORITIES_SUPPORTED = 78
    MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81
    MAX_REGISTERS_PER_MULTIPROCESSOR = 82
    MANAGED_MEMORY = 83
    COOPERATIVE_LAUNCH = 95
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
    MAX_BLOCKS_PER_MULTIPROCESSOR = 106
    RESERVED_SHARED_MEMORY_PER_BLOCK = 111
    MEMORY_POOLS_SUPPORTED = 115
    CLUSTER_LAUNCH = 120
    MULTICAST_SUPPORTED = 132


def device_attribute(device: Device, attribute: int) -> int | None:
    """cudaDeviceGetAttribute; None where the attribute is not known here."""
    a = DeviceAttribute
    answers = {
        a.MAX_THREADS_PER_BLOCK: device.max_threads_per_cta,
        a.MAX_BLOCK_DIM_X: 1024,
        a.MAX_BLOCK_DIM_Y: 1024,
        a.MAX_BLOCK_DIM_Z: 64,
        a.MAX_GRID_DIM_X: 2**31 - 1,
        a.MAX_GRID_DIM_Y: 65535,
        a.MAX_GRID_DIM_Z: 65535,
        a.MAX_SHARED_MEMORY_PER_BLOCK: SHARED_WITHOUT_OPT_IN,
        a.TOTAL_CONSTANT_MEMORY: 65536,
        a.WARP_SIZE: 32,
        a.MAX_PITCH: 2**31 - 1,
        a.MAX_REGISTERS_PER_BLOCK: device.registers_per_sm,
        a.CLOCK_RATE: 1_830_000,
        a.MULTIPROCESSOR_COUNT: device.num_sms,
        a.INTEGRATED: 0,
        a.COMPUTE_MODE: 0,
        a.CONCURRENT_KERNELS: 1,
        a.MEMORY_CLOCK_RATE: 2_619_000,
        a.GLOBAL_MEMORY_BUS_WIDTH: 5120,
        a.L2_CACHE_SIZE: _L2_BYTES[device.capability[0]],
        a.MAX_THREADS_PER_MULTIPROCESSOR: MAX_THREADS,
        a.ASYNC_ENGINE_COUNT: 3,
        a.UNIFIED_ADDRESSING: 1,
        a.COMPUTE_CAPABILITY_MAJOR: device.capability[0],
        a.COMPUTE_CAPABILITY_MINOR: device.capability[1],
        a.STREAM_PRIORITIES_SUPPORTED: 1,
        a.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: device.shared_bytes_per_cta + SYSTEM_SHARED_BYTES,
        a.MAX_REGISTERS_PER_MULTIPROCESSOR: device.registers_per_sm,
        a.MANAGED_MEMORY: 1,
        a.COOPERATIVE_LAUNCH: 1,
        a.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: device.shared_bytes_per_cta,
        a.MAX_BLOCKS_PER_MULTIPROCESSOR: MAX_CTAS,
        a.RESERVED_SHARED_MEMORY_PER_BLOCK: SYSTEM_SHARED_BYTES,
        a.MEMORY_POOLS_SUPPORTED: 1,
        a.CLUSTER_LAUNCH: 1,
        a.MULTICAST_SUPPORTED: 0,
    }
    if attribute in DeviceAttribute.__members__.values():
        return answers[DeviceAttribute(attribute)]
    return _MORE_ATTRIBUTES.get(attribute)


# Attributes by number that are the same on both devices; of what is not emulated the answer is no.
_MORE_ATTRIBUTES = {
    14: 512,  # texture alignment
    15: 1,  # GPU overlap
    17: 0,  # kernel execution timeout
    19: 1,  # can map host memory
    30: 512,  # surface alignment
    32: 1,  # ECC
    33: 1,  # PCI bus
    34: 0,  # PCI device
    35: 0,  # TCC driver
    50: 0,  # PCI domain
    51: 32,  # texture pitch alignment
    79: 1,  # global L1 cache
    80: 1,  # local L1 cache
    84: 0,  # multi-GPU board
    86: 0,  # native atomics between host and device
    87: 2,  # single to double performance
    88: 0,  # pageable memory access
    89: 1,  # concurrent managed access
    90: 1,  # compute preemption
    91: 1,  # host pointers of registered memory
    92: 0,  # stream memory operations
    96: 0,  # cooperative launches on several devices
    98: 0,  # flush remote writes
    99: 0,  # host memory can be registered
    100: 0,  # pageable memory uses the host's page tables
    102: 0,  # virtual memory management
    107: 0,  # generic compression
    108: 32 * 2**20,  # persisting L2 cache
    109: 128 * 2**20,  # access policy window
    116: 0,  # GPUDirect RDMA
    119: 0,  # handles of memory pools
    127: 1,  # tensor maps
    128: 0,  # host NUMA memory
    129: 0,  # unified function pointers
}
