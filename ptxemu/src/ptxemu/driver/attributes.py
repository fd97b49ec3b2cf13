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


_ATTRIBUTES = {
    2: 1024,  # x of a block
    3: 1024,  # y of a block
    4: 64,  # z of a block
    5: 2**31 - 1,  # x of a grid
    6: 65535,  # y of a grid
    7: 65535,  # z of a grid
    8: SHARED_WITHOUT_OPT_IN,  # shared memory of a block
    9: 65536,  # constant memory
    10: 32,  # warp size
    11: 2**31 - 1,  # pitch
    13: 1_830_000,  # clock rate, kHz
    14: 512,  # texture alignment
    15: 1,  # GPU overlap
    17: 0,  # kernel execution timeout
    18: 0,  # integrated GPU
    19: 1,  # can map host memory
    20: 0,  # compute mode
    30: 512,  # surface alignment
    31: 1,  # concurrent kernels
    32: 1,  # ECC
    33: 1,  # PCI bus
    34: 0,  # PCI device
    35: 0,  # TCC driver
    36: 2_619_000,  # memory clock rate, kHz
    37: 5120,  # memory bus, bits
    39: MAX_THREADS,  # threads of a multiprocessor
    40: 3,  # copy engines
    41: 1,  # unified addressing
    50: 0,  # PCI domain
    51: 32,  # texture pitch alignment
    78: 1,  # stream priorities
    79: 1,  # global L1 cache
    80: 1,  # local L1 cache
    83: 1,  # managed memory
    84: 0,  # multi-GPU board
    86: 0,  # native atomics between host and device
    87: 2,  # single to double performance
    88: 0,  # pageable memory access
    89: 1,  # concurrent managed access
    90: 1,  # compute preemption
    91: 1,  # host pointers of registered memory
    92: 0,  # stream memory operations
    95: 1,  # cooperative launches
    96: 0,  # cooperative launches on several devices
    98: 0,  # flush remote writes
    99: 0,  # host memory can be registered
    100: 0,  # pageable memory uses the host's page tables
    102: 0,  # virtual memory management
    106: MAX_CTAS,  # blocks of a multiprocessor
    107: 0,  # generic compression
    108: 32 * 2**20,  # persisting L2 cache
    109: 128 * 2**20,  # access policy window
    111: SYSTEM_SHARED_BYTES,  # shared memory of a block that the system has
    115: 1,  # memory pools
    116: 0,  # GPUDirect RDMA
    119: 0,  # handles of memory pools
    120: 1,  # clusters
    127: 1,  # tensor maps
    128: 0,  # host NUMA memory
    129: 0,  # unified function pointers
    132: 0,  # multicast
}
"""CUdevice_attribute (cudaDeviceAttr has the same numbers), the same on all devices; of what is not
emulated the answer is no."""


def device_attribute(device: Device, attribute: int) -> int | None:
    """cudaDeviceGetAttribute; None where the attribute is not known here."""
    of_device = {
        1: device.max_threads_per_cta,  # threads of a block
        12: device.registers_per_sm,  # registers of a block
        16: device.num_sms,  # multiprocessors
        38: _L2_BYTES[device.capability[0]],  # L2 cache
        75: device.capability[0],  # compute capability, major
        76: device.capability[1],  # compute capability, minor
        81: device.shared_bytes_per_cta + SYSTEM_SHARED_BYTES,  # shared memory of a multiprocessor
        82: device.registers_per_sm,  # registers of a multiprocessor
        97: device.shared_bytes_per_cta,  # shared memory of a block, opted in
    }
    return of_device.get(attribute, _ATTRIBUTES.get(attribute))
