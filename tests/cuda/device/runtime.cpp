// A stand-in for the CUDA runtime: one device with the sizes of an H100, whose memory is the host's and whose kernels do
// nothing. It is preloaded, so that its functions are found before those of libcudart; build.py adds functions that only
// return success for everything else that libcudart exports.
#include <cstdlib>
#include <cstring>

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#undef cudaGetDeviceProperties

#define EXPORT extern "C" __attribute__((visibility("default")))

// Number of times that the host waited for the device; tests read and compare these.
EXPORT long null_stream_waits = 0, null_device_waits = 0, null_event_waits = 0, null_copies_to_host = 0;

static thread_local int current_device = 0;
static const size_t device_bytes = 80ull << 30;

// --- The device

EXPORT cudaError_t cudaGetDeviceCount(int *count) { *count = 1; return cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int *device) { *device = current_device; return cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) { current_device = device; return cudaSuccess; }
EXPORT cudaError_t cudaInitDevice(int device, unsigned, unsigned) { current_device = device; return cudaSuccess; }
EXPORT cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }

static cudaDeviceProp h100() {
    cudaDeviceProp device;
    memset(&device, 0, sizeof device);
    strcpy(device.name, "NVIDIA H100 80GB HBM3");
    device.totalGlobalMem = device_bytes;
    device.major = 9;
    device.minor = 0;
    device.multiProcessorCount = 132;
    device.warpSize = 32;
    device.maxThreadsPerBlock = 1024;
    device.maxThreadsPerMultiProcessor = 2048;
    device.maxBlocksPerMultiProcessor = 32;
    device.sharedMemPerBlock = 48 << 10;
    device.sharedMemPerBlockOptin = 227 << 10;
    device.sharedMemPerMultiprocessor = 228 << 10;
    device.regsPerBlock = device.regsPerMultiprocessor = 65536;
    device.l2CacheSize = 50 << 20;
    device.maxGridSize[0] = 2147483647;
    device.maxGridSize[1] = device.maxGridSize[2] = 65535;
    device.maxThreadsDim[0] = device.maxThreadsDim[1] = 1024;
    device.maxThreadsDim[2] = 64;
    device.unifiedAddressing = device.concurrentKernels = 1;
    device.textureAlignment = 512;
    return device;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp *device, int) { *device = h100(); return cudaSuccess; }
EXPORT cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp *device, int) { *device = h100(); return cudaSuccess; }

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    cudaDeviceProp device = h100();
    switch (attribute) {
        case cudaDevAttrComputeCapabilityMajor: *value = device.major; break;
        case cudaDevAttrMultiProcessorCount: *value = device.multiProcessorCount; break;
        case cudaDevAttrWarpSize: *value = device.warpSize; break;
        case cudaDevAttrMaxThreadsPerBlock: *value = device.maxThreadsPerBlock; break;
        case cudaDevAttrMaxThreadsPerMultiProcessor: *value = device.maxThreadsPerMultiProcessor; break;
        case cudaDevAttrMaxSharedMemoryPerBlock: *value = device.sharedMemPerBlock; break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = device.sharedMemPerBlockOptin; break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = device.sharedMemPerMultiprocessor; break;
        default: *value = 0;
    }
    return cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { *can = 0; return cudaSuccess; }
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int) {
    strncpy(text, "0000:00:00.0", size);
    return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceSynchronize() { null_device_waits++; return cudaSuccess; }

// --- Memory

static cudaError_t take(void **pointer, size_t bytes) {
    *pointer = aligned_alloc(512, (bytes + 511) / 512 * 512);
    return *pointer ? cudaSuccess : cudaErrorMemoryAllocation;
}
static cudaError_t give_back(void *pointer) { free(pointer); return cudaSuccess; }

EXPORT cudaError_t cudaMalloc(void **pointer, size_t bytes) { return take(pointer, bytes); }
EXPORT cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t) { return take(pointer, bytes); }
EXPORT cudaError_t cudaMallocHost(void **pointer, size_t bytes) { return take(pointer, bytes); }
EXPORT cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned) { return take(pointer, bytes); }
EXPORT cudaError_t cudaFree(void *pointer) { return give_back(pointer); }
EXPORT cudaError_t cudaFreeAsync(void *pointer, cudaStream_t) { return give_back(pointer); }
EXPORT cudaError_t cudaFreeHost(void *pointer) { return give_back(pointer); }
EXPORT cudaError_t cudaHostGetDevicePointer(void **pointer, void *host, unsigned) { *pointer = host; return cudaSuccess; }
EXPORT cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *available = *total = device_bytes;
    return cudaSuccess;
}
EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = attributes->hostPointer = (void *)pointer;
    return cudaSuccess;
}
EXPORT cudaError_t cudaGetSymbolAddress(void **pointer, const void *) {
    static char variable[4096];
    *pointer = variable;
    return cudaSuccess;
}

static cudaError_t copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    null_copies_to_host += kind == cudaMemcpyDeviceToHost;
    memmove(to, from, bytes);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    return copy(to, from, bytes, kind);
}
EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
    return copy(to, from, bytes, kind);
}
EXPORT cudaError_t cudaMemset(void *to, int value, size_t bytes) { memset(to, value, bytes); return cudaSuccess; }
EXPORT cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t) {
    memset(to, value, bytes);
    return cudaSuccess;
}

// --- Streams and events: everything has happened already

template <typename Handle> static cudaError_t handle(Handle *made) {
    *made = (Handle)malloc(8);
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) { return handle(stream); }
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) { return handle(stream); }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned, int) { return handle(stream); }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) { *priority = 0; return cudaSuccess; }
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t) { null_stream_waits++; return cudaSuccess; }
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return handle(event); }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) { return handle(event); }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t) { null_event_waits++; return cudaSuccess; }
EXPORT cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t, cudaEvent_t) {
    *milliseconds = 1;
    return cudaSuccess;
}

// --- Kernels

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    attributes->numRegs = 32;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int, size_t) {
    *blocks = 2;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t,
                                                                          unsigned) {
    *blocks = 2;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveClusters(int *clusters, const void *, const cudaLaunchConfig_t *) {
    *clusters = 1;
    return cudaSuccess;
}

// Functions of the driver are those of the stand-in driver.
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult *result) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
    *function = driver ? dlsym(driver, name) : nullptr;
    if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
