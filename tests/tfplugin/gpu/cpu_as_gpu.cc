// A device of type GPU whose memory and queue are the CPU's: with it TensorFlow places, copies and runs as on
// a machine with a GPU, but for its own CUDA kernels, which fail. Tables on it are those of GPUs, on the
// CPU's threads (kvtools._device_table.stand_in_for_gpus).
#include <cstdlib>
#include <cstring>

#include "tensorflow/c/experimental/stream_executor/stream_executor.h"

struct SP_Stream_st {};
struct SP_Event_st {};
struct SP_Timer_st {};

namespace {

void Allocate(const SP_Device*, uint64_t size, int64_t, SP_DeviceMemoryBase* memory) {
  memory->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
  memory->opaque = std::aligned_alloc(256, (size + 255) / 256 * 256);
  memory->size = size;
}
void Deallocate(const SP_Device*, SP_DeviceMemoryBase* memory) {
  std::free(memory->opaque);
  memory->opaque = nullptr;
  memory->size = 0;
}
void* AllocateHost(const SP_Device*, uint64_t size) { return std::aligned_alloc(64, (size + 63) / 64 * 64); }
void DeallocateHost(const SP_Device*, void* memory) { std::free(memory); }
TF_Bool NoStats(const SP_Device*, SP_AllocatorStats*) { return 0; }
TF_Bool MemoryUsage(const SP_Device*, int64_t* free, int64_t* total) {
  *free = *total = int64_t{1} << 30;
  return 1;
}
void CreateStream(const SP_Device*, SP_Stream* stream, TF_Status*) { *stream = new SP_Stream_st; }
void DestroyStream(const SP_Device*, SP_Stream stream) { delete stream; }
void StreamDependency(const SP_Device*, SP_Stream, SP_Stream, TF_Status*) {}
void StreamStatus(const SP_Device*, SP_Stream, TF_Status*) {}
void CreateEvent(const SP_Device*, SP_Event* event, TF_Status*) { *event = new SP_Event_st; }
void DestroyEvent(const SP_Device*, SP_Event event) { delete event; }
SE_EventStatus EventStatus(const SP_Device*, SP_Event) { return SE_EVENT_COMPLETE; }
void OnEvent(const SP_Device*, SP_Stream, SP_Event, TF_Status*) {}
void CreateTimer(const SP_Device*, SP_Timer* timer, TF_Status*) { *timer = new SP_Timer_st; }
void DestroyTimer(const SP_Device*, SP_Timer timer) { delete timer; }
void OnTimer(const SP_Device*, SP_Stream, SP_Timer, TF_Status*) {}
void CopyOut(const SP_Device*, SP_Stream, void* to, const SP_DeviceMemoryBase* from, uint64_t n, TF_Status*) {
  std::memcpy(to, from->opaque, n);
}
void CopyIn(const SP_Device*, SP_Stream, SP_DeviceMemoryBase* to, const void* from, uint64_t n, TF_Status*) {
  std::memcpy(to->opaque, from, n);
}
void CopyWithin(const SP_Device*, SP_Stream, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from,
                uint64_t n, TF_Status*) {
  std::memcpy(to->opaque, from->opaque, n);
}
void CopyOutNow(const SP_Device*, void* to, const SP_DeviceMemoryBase* from, uint64_t n, TF_Status*) {
  std::memcpy(to, from->opaque, n);
}
void CopyInNow(const SP_Device*, SP_DeviceMemoryBase* to, const void* from, uint64_t n, TF_Status*) {
  std::memcpy(to->opaque, from, n);
}
void CopyWithinNow(const SP_Device*, SP_DeviceMemoryBase* to, const SP_DeviceMemoryBase* from, uint64_t n,
                   TF_Status*) {
  std::memcpy(to->opaque, from->opaque, n);
}
void BlockForEvent(const SP_Device*, SP_Event, TF_Status*) {}
void BlockUntilDone(const SP_Device*, SP_Stream, TF_Status*) {}
void Synchronize(const SP_Device*, TF_Status*) {}
void Zero(const SP_Device*, SP_Stream, SP_DeviceMemoryBase* at, uint64_t n, TF_Status*) {
  std::memset(at->opaque, 0, n);
}
void Set(const SP_Device*, SP_Stream, SP_DeviceMemoryBase* at, uint8_t byte, uint64_t n, TF_Status*) {
  std::memset(at->opaque, byte, n);
}
void Set32(const SP_Device*, SP_Stream, SP_DeviceMemoryBase* at, uint32_t word, uint64_t n, TF_Status*) {
  for (uint64_t i = 0; i < n / 4; ++i) static_cast<uint32_t*>(at->opaque)[i] = word;
}
TF_Bool Callback(const SP_Device*, SP_Stream, SE_StatusCallbackFn call, void* argument) {
  call(argument, nullptr);
  return 1;
}

void DeviceCount(const SP_Platform*, int* count, TF_Status*) { *count = 1; }
void CreateDevice(const SP_Platform*, SE_CreateDeviceParams* params, TF_Status*) {
  params->device->struct_size = SP_DEVICE_STRUCT_SIZE;
  params->device->ordinal = params->ordinal;
  params->device->hardware_name = "CPU as a GPU";
  params->device->device_vendor = "none";
  params->device->pci_bus_id = "0000:00:00.0";
}
void DestroyDevice(const SP_Platform*, SP_Device*) {}
int32_t NumaNode(const SP_Device*) { return -1; }
int64_t Bandwidth(const SP_Device*) { return -1; }
double Gflops(const SP_Device*) { return -1; }
void CreateDeviceFns(const SP_Platform*, SE_CreateDeviceFnsParams* params, TF_Status*) {
  *params->device_fns = {SP_DEVICE_FNS_STRUCT_SIZE, nullptr, NumaNode, Bandwidth, Gflops};
}
void DestroyDeviceFns(const SP_Platform*, SP_DeviceFns*) {}
void CreateExecutor(const SP_Platform*, SE_CreateStreamExecutorParams* params, TF_Status*) {
  SP_StreamExecutor* const e = params->stream_executor;
  e->struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
  e->allocate = Allocate;
  e->deallocate = Deallocate;
  e->host_memory_allocate = AllocateHost;
  e->host_memory_deallocate = DeallocateHost;
  e->get_allocator_stats = NoStats;
  e->device_memory_usage = MemoryUsage;
  e->create_stream = CreateStream;
  e->destroy_stream = DestroyStream;
  e->create_stream_dependency = StreamDependency;
  e->get_stream_status = StreamStatus;
  e->create_event = CreateEvent;
  e->destroy_event = DestroyEvent;
  e->get_event_status = EventStatus;
  e->record_event = OnEvent;
  e->wait_for_event = OnEvent;
  e->create_timer = CreateTimer;
  e->destroy_timer = DestroyTimer;
  e->start_timer = OnTimer;
  e->stop_timer = OnTimer;
  e->memcpy_dtoh = CopyOut;
  e->memcpy_htod = CopyIn;
  e->memcpy_dtod = CopyWithin;
  e->sync_memcpy_dtoh = CopyOutNow;
  e->sync_memcpy_htod = CopyInNow;
  e->sync_memcpy_dtod = CopyWithinNow;
  e->block_host_for_event = BlockForEvent;
  e->block_host_until_done = BlockUntilDone;
  e->synchronize_all_activity = Synchronize;
  e->mem_zero = Zero;
  e->memset = Set;
  e->memset32 = Set32;
  e->host_callback = Callback;
}
void DestroyExecutor(const SP_Platform*, SP_StreamExecutor*) {}
uint64_t Nanoseconds(SP_Timer) { return 0; }
void CreateTimerFns(const SP_Platform*, SP_TimerFns* timer, TF_Status*) {
  *timer = {SP_TIMER_FNS_STRUCT_SIZE, nullptr, Nanoseconds};
}
void DestroyTimerFns(const SP_Platform*, SP_TimerFns*) {}
void DestroyPlatform(SP_Platform*) {}
void DestroyPlatformFns(SP_PlatformFns*) {}

}  // namespace

void SE_InitPlugin(SE_PlatformRegistrationParams* params, TF_Status*) {
  params->platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  params->platform->name = "CPU_AS_GPU";
  params->platform->type = "GPU";
  params->platform->supports_unified_memory = 0;
  params->platform->use_bfc_allocator = 0;
  params->platform->force_memory_growth = 1;
  SP_PlatformFns* const f = params->platform_fns;
  f->struct_size = SP_PLATFORM_FNS_STRUCT_SIZE;
  f->get_device_count = DeviceCount;
  f->create_device = CreateDevice;
  f->destroy_device = DestroyDevice;
  f->create_device_fns = CreateDeviceFns;
  f->destroy_device_fns = DestroyDeviceFns;
  f->create_stream_executor = CreateExecutor;
  f->destroy_stream_executor = DestroyExecutor;
  f->create_timer_fns = CreateTimerFns;
  f->destroy_timer_fns = DestroyTimerFns;
  params->destroy_platform = DestroyPlatform;
  params->destroy_platform_fns = DestroyPlatformFns;
}
