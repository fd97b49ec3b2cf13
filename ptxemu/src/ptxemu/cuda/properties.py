"""cudaDeviceProp: the structure that cudaGetDeviceProperties fills, from the device's facts.

CUDA 13 has other offsets than CUDA 12. The rows name what both have, with the attribute of the
driver (CUdevice_attribute) that holds the value.
"""

from __future__ import annotations

import struct

from ptxemu.driver.attributes import device_attribute, memory_bytes
from ptxemu.machine.device import Device

_SIZES = {12: 1032, 13: 1008}
# (field, offset in CUDA 13, offset in CUDA 12 (None: not there), format, attribute)
_ROWS: tuple[tuple[str, int | None, int | None, str, int], ...] = (
    ("sharedMemPerBlock", 296, 296, "Q", 8),
    ("regsPerBlock", 304, 304, "i", 12),
    ("warpSize", 308, 308, "i", 10),
    ("memPitch", 312, 312, "Q", 11),
    ("maxThreadsPerBlock", 320, 320, "i", 1),
    ("maxThreadsDim[0]", 324, 324, "i", 2),
    ("maxThreadsDim[1]", 328, 328, "i", 3),
    ("maxThreadsDim[2]", 332, 332, "i", 4),
    ("maxGridSize[0]", 336, 336, "i", 5),
    ("maxGridSize[1]", 340, 340, "i", 6),
    ("maxGridSize[2]", 344, 344, "i", 7),
    ("clockRate", None, 348, "i", 13),
    ("totalConstMem", 352, 352, "Q", 9),
    ("major", 360, 360, "i", 75),
    ("minor", 364, 364, "i", 76),
    ("textureAlignment", 368, 368, "Q", 14),
    ("texturePitchAlignment", 376, 376, "Q", 51),
    ("deviceOverlap", None, 384, "i", 15),
    ("multiProcessorCount", 384, 388, "i", 16),
    ("integrated", 388, 396, "i", 18),
    ("canMapHostMemory", 392, 400, "i", 19),
    ("surfaceAlignment", 552, 568, "Q", 30),
    ("concurrentKernels", 560, 576, "i", 31),
    ("asyncEngineCount", 584, 600, "i", 40),
    ("unifiedAddressing", 588, 604, "i", 41),
    ("memoryClockRate", None, 608, "i", 36),
    ("memoryBusWidth", 592, 612, "i", 37),
    ("l2CacheSize", 596, 616, "i", 38),
    ("persistingL2CacheMaxSize", 600, 620, "i", 108),
    ("maxThreadsPerMultiProcessor", 604, 624, "i", 39),
    ("streamPrioritiesSupported", 608, 628, "i", 78),
    ("globalL1CacheSupported", 612, 632, "i", 79),
    ("localL1CacheSupported", 616, 636, "i", 80),
    ("sharedMemPerMultiprocessor", 624, 640, "Q", 81),
    ("regsPerMultiprocessor", 632, 648, "i", 82),
    ("managedMemory", 636, 652, "i", 83),
    ("pageableMemoryAccess", 652, 672, "i", 88),
    ("concurrentManagedAccess", 656, 676, "i", 89),
    ("computePreemptionSupported", 660, 680, "i", 90),
    ("canUseHostPointerForRegisteredMem", 664, 684, "i", 91),
    ("cooperativeLaunch", 668, 688, "i", 95),
    ("sharedMemPerBlockOptin", 672, 696, "Q", 97),
    ("maxBlocksPerMultiProcessor", 688, 712, "i", 106),
    ("reservedSharedMemPerBlock", 696, 720, "Q", 111),
    ("hostRegisterSupported", 704, 728, "i", 99),
    ("memoryPoolsSupported", 720, 744, "i", 115),
    ("clusterLaunch", 748, 772, "i", 120),
)
_TOTAL_MEMORY_OFFSET = 288


def device_name(device: Device) -> str:
    """Return the name that cudaDeviceProp.name and cuDeviceGetName give."""
    return f"ptxemu {device.arch}"


def device_properties(device: Device, version: int) -> bytes:
    """The structure of CUDA `version` (12 or 13)."""
    block = bytearray(_SIZES[version])
    name = device_name(device).encode()
    block[: len(name)] = name
    struct.pack_into("<Q", block, _TOTAL_MEMORY_OFFSET, memory_bytes(device))
    for _, in_13, in_12, code, attribute in _ROWS:
        offset = in_13 if version == 13 else in_12
        if offset is not None:
            struct.pack_into(f"<{code}", block, offset, device_attribute(device, attribute) or 0)
    return bytes(block)
