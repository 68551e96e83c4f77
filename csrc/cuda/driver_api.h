// The functions of libcuda that the engine calls, and the numbers that they take, as in cuda.h.
#pragma once

namespace torch_ort::cuda::api {

// Values of CUresult.
inline constexpr int kSuccess = 0;

// Whether the context is lost after a call returned this. All later calls then report the failure.
constexpr bool is_lost(int result) {
  switch (result) {
    case 4:    // DEINITIALIZED
    case 201:  // INVALID_CONTEXT
    case 214:  // ECC_UNCORRECTABLE
    case 220:  // NVLINK_UNCORRECTABLE
    case 226:  // CONTAINED
    case 700:  // ILLEGAL_ADDRESS
    case 702:  // LAUNCH_TIMEOUT
    case 709:  // CONTEXT_IS_DESTROYED
    case 710:  // ASSERT
    case 714:  // HARDWARE_STACK_ERROR
    case 715:  // ILLEGAL_INSTRUCTION
    case 716:  // MISALIGNED_ADDRESS
    case 717:  // INVALID_ADDRESS_SPACE
    case 718:  // INVALID_PC
    case 719:  // LAUNCH_FAILED
    case 721:  // TENSOR_MEMORY_LEAK
    case 911:  // EXTERNAL_DEVICE
    case 999:  // UNKNOWN
      return true;
    default: return false;
  }
}

// Values of CUdevice_attribute.
inline constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76, kMaxSharedOptIn = 97;

// Values of CUfunction_attribute.
inline constexpr int kMaxThreads = 0, kSharedBytes = 1, kLocalBytes = 3, kRegisters = 4,
                     kMaxDynamicShared = 8;

// Values of CUstreamCaptureMode.
inline constexpr int kCaptureRelaxed = 2;

// Flags of cuMemHostAlloc: for all contexts, and mapped into device memory.
inline constexpr unsigned kPortable = 1, kDeviceMap = 2;

}  // namespace torch_ort::cuda::api
