/* The structures of nvml.h that the library of a profile exchanges with its caller, and their layout for the test that compares it with pynvml's. */
#ifndef FAKE_NVML_TYPES_H
#define FAKE_NVML_TYPES_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int nvmlReturn_t;
typedef struct handle *nvmlDevice_t;
typedef struct event_set *nvmlEventSet_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { char busIdLegacy[16]; unsigned int domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32]; } nvmlPciInfo_t;
typedef struct { unsigned int pid; unsigned long long usedGpuMemory; unsigned int gpuInstanceId, computeInstanceId; } nvmlProcessInfo_t;
typedef struct { nvmlDevice_t device; unsigned long long eventType, eventData; unsigned int gpuInstanceId, computeInstanceId; } nvmlEventData_t;
typedef union { double dVal; unsigned int uiVal; unsigned long ulVal; unsigned long long ullVal; long long sllVal; int siVal; unsigned short usVal; } nvmlValue_t;
typedef struct { uint32_t fieldId, scopeId; int64_t timestamp, latencyUsec; int valueType; nvmlReturn_t nvmlReturn; nvmlValue_t value; } nvmlFieldValue_t;
typedef struct { unsigned int version; unsigned char clusterUuid[16]; nvmlReturn_t status; uint32_t cliqueId, state, healthMask; } nvmlGpuFabricInfo_v2_t;
typedef struct gpu_instance *nvmlGpuInstance_t;
typedef struct compute_instance *nvmlComputeInstance_t;
typedef struct { unsigned int start, size; } nvmlGpuInstancePlacement_t;
typedef nvmlGpuInstancePlacement_t nvmlComputeInstancePlacement_t;
typedef struct {
  unsigned int version, id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, copyEngineCount, decoderCount, encoderCount, jpegCount, ofaCount;
  unsigned long long memorySizeMB;
  char name[96];
} nvmlGpuInstanceProfileInfo_v2_t;
typedef struct { nvmlDevice_t device; unsigned int id, profileId; nvmlGpuInstancePlacement_t placement; } nvmlGpuInstanceInfo_t;
typedef struct {
  unsigned int version, id, sliceCount, instanceCount, multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount;
  char name[96];
} nvmlComputeInstanceProfileInfo_v2_t;
typedef struct { nvmlDevice_t device; nvmlGpuInstance_t gpuInstance; unsigned int id, profileId; nvmlComputeInstancePlacement_t placement; } nvmlComputeInstanceInfo_t;
typedef struct {
  unsigned int multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount, sharedOfaCount, gpuInstanceSliceCount, computeInstanceSliceCount;
  unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;
typedef struct sample *nvmlGpmSample_t;
typedef struct { unsigned int metricId; nvmlReturn_t nvmlReturn; double value; struct { char *shortName, *longName, *unit; } metricInfo; } nvmlGpmMetric_t;
enum { GPM_METRIC_MAX = 477 };
typedef struct { unsigned int version, numMetrics; nvmlGpmSample_t sample1, sample2; nvmlGpmMetric_t metrics[GPM_METRIC_MAX]; } nvmlGpmMetricsGet_t;
typedef struct { unsigned int version, isSupportedDevice; } nvmlGpmSupport_t;

/* What the layout test reads: a structure's size and its members' places. */
static size_t layout_of(const char *question) {
#define SIZE(type) if (!strcmp(question, #type)) return sizeof(type)
#define PLACE(type, member) if (!strcmp(question, #type "." #member)) return offsetof(type, member)
  SIZE(nvmlMemory_t); PLACE(nvmlMemory_t, total); PLACE(nvmlMemory_t, free); PLACE(nvmlMemory_t, used);
  SIZE(nvmlMemory_v2_t); PLACE(nvmlMemory_v2_t, version); PLACE(nvmlMemory_v2_t, total); PLACE(nvmlMemory_v2_t, reserved);
  PLACE(nvmlMemory_v2_t, free); PLACE(nvmlMemory_v2_t, used);
  SIZE(nvmlUtilization_t); PLACE(nvmlUtilization_t, gpu); PLACE(nvmlUtilization_t, memory);
  SIZE(nvmlPciInfo_t); PLACE(nvmlPciInfo_t, busIdLegacy); PLACE(nvmlPciInfo_t, domain); PLACE(nvmlPciInfo_t, bus); PLACE(nvmlPciInfo_t, device);
  PLACE(nvmlPciInfo_t, pciDeviceId); PLACE(nvmlPciInfo_t, pciSubSystemId); PLACE(nvmlPciInfo_t, busId);
  SIZE(nvmlProcessInfo_t); PLACE(nvmlProcessInfo_t, pid); PLACE(nvmlProcessInfo_t, usedGpuMemory); PLACE(nvmlProcessInfo_t, gpuInstanceId);
  PLACE(nvmlProcessInfo_t, computeInstanceId);
  SIZE(nvmlEventData_t); PLACE(nvmlEventData_t, device); PLACE(nvmlEventData_t, eventType); PLACE(nvmlEventData_t, eventData);
  PLACE(nvmlEventData_t, gpuInstanceId); PLACE(nvmlEventData_t, computeInstanceId);
  SIZE(nvmlFieldValue_t); PLACE(nvmlFieldValue_t, fieldId); PLACE(nvmlFieldValue_t, scopeId); PLACE(nvmlFieldValue_t, timestamp);
  PLACE(nvmlFieldValue_t, latencyUsec); PLACE(nvmlFieldValue_t, valueType); PLACE(nvmlFieldValue_t, nvmlReturn); PLACE(nvmlFieldValue_t, value);
  SIZE(nvmlGpuFabricInfo_v2_t); PLACE(nvmlGpuFabricInfo_v2_t, version); PLACE(nvmlGpuFabricInfo_v2_t, clusterUuid);
  PLACE(nvmlGpuFabricInfo_v2_t, status); PLACE(nvmlGpuFabricInfo_v2_t, cliqueId); PLACE(nvmlGpuFabricInfo_v2_t, state);
  PLACE(nvmlGpuFabricInfo_v2_t, healthMask);
  SIZE(nvmlGpuInstancePlacement_t); PLACE(nvmlGpuInstancePlacement_t, start); PLACE(nvmlGpuInstancePlacement_t, size);
  SIZE(nvmlGpuInstanceProfileInfo_v2_t); PLACE(nvmlGpuInstanceProfileInfo_v2_t, version); PLACE(nvmlGpuInstanceProfileInfo_v2_t, id);
  PLACE(nvmlGpuInstanceProfileInfo_v2_t, isP2pSupported); PLACE(nvmlGpuInstanceProfileInfo_v2_t, sliceCount);
  PLACE(nvmlGpuInstanceProfileInfo_v2_t, instanceCount); PLACE(nvmlGpuInstanceProfileInfo_v2_t, multiprocessorCount);
  PLACE(nvmlGpuInstanceProfileInfo_v2_t, copyEngineCount); PLACE(nvmlGpuInstanceProfileInfo_v2_t, decoderCount);
  PLACE(nvmlGpuInstanceProfileInfo_v2_t, encoderCount); PLACE(nvmlGpuInstanceProfileInfo_v2_t, jpegCount); PLACE(nvmlGpuInstanceProfileInfo_v2_t, ofaCount);
  PLACE(nvmlGpuInstanceProfileInfo_v2_t, memorySizeMB); PLACE(nvmlGpuInstanceProfileInfo_v2_t, name);
  SIZE(nvmlGpuInstanceInfo_t); PLACE(nvmlGpuInstanceInfo_t, device); PLACE(nvmlGpuInstanceInfo_t, id); PLACE(nvmlGpuInstanceInfo_t, profileId);
  PLACE(nvmlGpuInstanceInfo_t, placement);
  SIZE(nvmlComputeInstanceProfileInfo_v2_t); PLACE(nvmlComputeInstanceProfileInfo_v2_t, version); PLACE(nvmlComputeInstanceProfileInfo_v2_t, id);
  PLACE(nvmlComputeInstanceProfileInfo_v2_t, sliceCount); PLACE(nvmlComputeInstanceProfileInfo_v2_t, instanceCount);
  PLACE(nvmlComputeInstanceProfileInfo_v2_t, multiprocessorCount); PLACE(nvmlComputeInstanceProfileInfo_v2_t, sharedCopyEngineCount);
  PLACE(nvmlComputeInstanceProfileInfo_v2_t, sharedDecoderCount); PLACE(nvmlComputeInstanceProfileInfo_v2_t, sharedEncoderCount);
  PLACE(nvmlComputeInstanceProfileInfo_v2_t, sharedJpegCount); PLACE(nvmlComputeInstanceProfileInfo_v2_t, sharedOfaCount);
  PLACE(nvmlComputeInstanceProfileInfo_v2_t, name);
  SIZE(nvmlComputeInstanceInfo_t); PLACE(nvmlComputeInstanceInfo_t, device); PLACE(nvmlComputeInstanceInfo_t, gpuInstance);
  PLACE(nvmlComputeInstanceInfo_t, id); PLACE(nvmlComputeInstanceInfo_t, profileId); PLACE(nvmlComputeInstanceInfo_t, placement);
  SIZE(nvmlDeviceAttributes_t); PLACE(nvmlDeviceAttributes_t, multiprocessorCount); PLACE(nvmlDeviceAttributes_t, sharedCopyEngineCount);
  PLACE(nvmlDeviceAttributes_t, sharedDecoderCount); PLACE(nvmlDeviceAttributes_t, sharedEncoderCount); PLACE(nvmlDeviceAttributes_t, sharedJpegCount);
  PLACE(nvmlDeviceAttributes_t, sharedOfaCount); PLACE(nvmlDeviceAttributes_t, gpuInstanceSliceCount); PLACE(nvmlDeviceAttributes_t, computeInstanceSliceCount);
  PLACE(nvmlDeviceAttributes_t, memorySizeMB);
  SIZE(nvmlGpmMetric_t); PLACE(nvmlGpmMetric_t, metricId); PLACE(nvmlGpmMetric_t, nvmlReturn); PLACE(nvmlGpmMetric_t, value); PLACE(nvmlGpmMetric_t, metricInfo);
  SIZE(nvmlGpmMetricsGet_t); PLACE(nvmlGpmMetricsGet_t, version); PLACE(nvmlGpmMetricsGet_t, numMetrics); PLACE(nvmlGpmMetricsGet_t, sample1);
  PLACE(nvmlGpmMetricsGet_t, sample2); PLACE(nvmlGpmMetricsGet_t, metrics);
  SIZE(nvmlGpmSupport_t); PLACE(nvmlGpmSupport_t, version); PLACE(nvmlGpmSupport_t, isSupportedDevice);
  return (size_t)-1;
}

#endif
