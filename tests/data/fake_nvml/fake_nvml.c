/* A libnvidia-ml of a profile: the functions that services/topobus/gpu/plugins/nvml*.py calls, with the real structures, answering from a text file.
 *
 * The file `profile` lies beside the library and is read anew at each call, so a test changes a GPU by renaming another file into its place.
 * Lines (a `gpu` line begins a GPU, what follows is its own; `#` begins a comment):
 *   session CODE                    every function answers this nvmlReturn_t, nvmlInit too; 0: none does
 *   driver VERSION CUDA             580.95.05 13000
 *   gpu ADDRESS                     0000:18:00.0
 *   uuid TEXT / name TEXT / minor N / memory TOTAL USED / mig CURRENT PENDING / capability MAJOR MINOR / architecture N / brand N
 *   process PID USED [GI CI]        a compute process; `graphics PID USED` a graphics one
 *   ecc CORRECTED UNCORRECTED       volatile counts; a GPU without the line has no ECC (NOT_SUPPORTED)
 *   retired PENDING                 as nvmlDeviceGetRetiredPagesPendingStatus; without the line NOT_SUPPORTED
 *   rows CORRECTED UNCORRECTED PENDING FAILED
 *   clocks MASK                     nvmlClocksEventReason*
 *   recovery N                      field NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
 *   link PEER|switch|down [REPLAY RECOVERY CRC_FLIT CRC_DATA ECC_DATA]
 *   fabric STATE STATUS HEALTHMASK  nvmlGpuFabricInfoV; without the line NOT_SUPPORTED
 *   use GPU MEMORY                  percent; without the line, and in MIG mode, NOT_SUPPORTED; so are those below without theirs
 *   power MILLIWATTS MILLIJOULES
 *   temperature GPU MEMORY
 *   frequency SM MEMORY             in MHz
 *   pcie SENT RECEIVED              fields NVML_FI_DEV_PCIE_COUNT_*_BYTES
 *   instance GI UNCORRECTED USE     what a GPU instance counts outside its memory, and its use in percent, with which its GPU has performance monitoring
 *   nvlink SENT RECEIVED            fields NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_* of all links, in KiB
 *   error CODE                      every function with this GPU answers it
 *   refuse FUNCTION CODE            one function with this GPU answers it
 *   event SERIAL TYPE DATA [GI CI]  nvmlEventSetWait gives it once to each set made before it stood here; TYPE is a mask in hex, 8 an Xid
 * MIG: lines `migprofile` and `engines`, and the instances that exist, in fake_mig.c.
 * Source: nvml.h as pynvml 13 restates it in ctypes; tests/unit/gpu/test_fake_nvml.py compares the layouts.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, IN_USE = 19, INSUFFICIENT_RESOURCES = 23, VERSION_MISMATCH = 25 };
enum { MAX_GPUS = 32, MAX_HANDLES = 256, MAX_PROFILES = 12, MAX_STARTS = 8, MAX_LINKS = 36, MAX_PROCESSES = 64, MAX_EVENTS = 64, MAX_REFUSALS = 16, MAX_SETS = 64, MAX_COUNTED = 16 };
enum { FIELD_MEMORY_TEMP = 82, FIELD_NVLINK_SPEED_MBPS_COMMON = 90, FIELD_NVLINK_DATA_TX = 138, FIELD_NVLINK_DATA_RX = 139, FIELD_PCIE_TX_BYTES = 197, FIELD_PCIE_RX_BYTES = 198, FIELD_RECOVERY_ACTION = 230 };
enum { VALUE_UNSIGNED_INT = 1, VALUE_UNSIGNED_LONG_LONG = 3 };
/* Two numbers of a line, if the GPU has it. */
struct pair { int is_known; unsigned long long first, second; };

#include "nvml_types.h"

size_t fake_layout(const char *question) { return layout_of(question); }

struct pci { unsigned int domain, bus, device, function; };
struct link { int is_up, is_switch; struct pci peer; unsigned long long errors[5]; };
struct refusal { char function[64]; nvmlReturn_t code; };
struct event { unsigned long long serial, type, data; unsigned int gi, ci; };
struct processes { unsigned int count; nvmlProcessInfo_t list[MAX_PROCESSES]; };
struct mig_profile { unsigned int index, id, slices, count, engines[6], size, start_count, starts[MAX_STARTS]; unsigned long long memory_mb; char name[64]; };
struct counted { unsigned int gi, percent; unsigned long long uncorrected; };
struct gpu {
  struct pci address;
  char uuid[96], name[96];
  unsigned int minor, mig[2], capability[2], architecture, brand, rows[4], recovery, retired, fabric[3], link_count, refusal_count, event_count, profile_count, counted_count, engines[6];
  int has_ecc, has_retired, has_fabric;
  unsigned long long memory_total, memory_used, ecc[2], clocks;
  nvmlReturn_t error;
  struct pair use, power, temperature, frequency, pcie, nvlink;
  struct processes compute, graphics;
  struct link links[MAX_LINKS];
  struct refusal refusals[MAX_REFUSALS];
  struct event events[MAX_EVENTS];
  struct counted counted[MAX_COUNTED];
  struct mig_profile profiles[MAX_PROFILES];
};
struct profile { nvmlReturn_t session; char driver[64]; int cuda; unsigned int count; struct gpu gpus[MAX_GPUS]; };
/* A device's handle stays the same for as long as the library is loaded. That of a MIG device has a GI and a CI, that of a GPU UINT_MAX for both. */
struct handle { struct pci address; unsigned int gi, ci; };
struct event_set { int is_used; unsigned int device_count; struct { nvmlDevice_t device; unsigned long long types, seen; } devices[MAX_GPUS]; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct profile now;
static struct handle handles[MAX_HANDLES];
static unsigned int handle_count;
static struct event_set sets[MAX_SETS];
static int starts;

static int parse_mig_line(struct gpu *gpu, const char *key, const char *rest);
static void read_instances(const char *profile_path), describe_mig_device(nvmlDevice_t device, struct gpu *gpu);
static nvmlReturn_t of_mig_device(nvmlDevice_t device, const char *function);

static int is_same(struct pci a, struct pci b) { return a.domain == b.domain && a.bus == b.bus && a.device == b.device && a.function == b.function; }

static int parse_pci(const char *text, struct pci *address) {
  return sscanf(text, "%x:%x:%x.%x", &address->domain, &address->bus, &address->device, &address->function) == 4;
}

static void add_process(struct processes *processes, const char *text) {
  nvmlProcessInfo_t process = {.gpuInstanceId = UINT_MAX, .computeInstanceId = UINT_MAX};
  if (processes->count < MAX_PROCESSES && sscanf(text, "%u %llu %u %u", &process.pid, &process.usedGpuMemory, &process.gpuInstanceId, &process.computeInstanceId) >= 2)
    processes->list[processes->count++] = process;
}

static void add_link(struct gpu *gpu, const char *text) {
  struct link link = {0};
  char peer[64];
  if (gpu->link_count == MAX_LINKS || sscanf(text, "%63s %llu %llu %llu %llu %llu", peer, &link.errors[0], &link.errors[1], &link.errors[2], &link.errors[3], &link.errors[4]) < 1) return;
  link.is_switch = !strcmp(peer, "switch");
  link.is_up = strcmp(peer, "down") != 0;
  if (link.is_up && !link.is_switch) parse_pci(peer, &link.peer);
  gpu->links[gpu->link_count++] = link;
}

static void parse_pair(struct pair *pair, const char *text) { pair->is_known = sscanf(text, "%llu %llu", &pair->first, &pair->second) == 2; }

static void parse_gpu_line(struct gpu *gpu, const char *key, const char *rest) {
  struct event event = {.gi = UINT_MAX, .ci = UINT_MAX};
  struct refusal refusal;
  if (!strcmp(key, "uuid")) snprintf(gpu->uuid, sizeof gpu->uuid, "%s", rest);
  else if (!strcmp(key, "name")) snprintf(gpu->name, sizeof gpu->name, "%s", rest);
  else if (!strcmp(key, "minor")) sscanf(rest, "%u", &gpu->minor);
  else if (!strcmp(key, "memory")) sscanf(rest, "%llu %llu", &gpu->memory_total, &gpu->memory_used);
  else if (!strcmp(key, "mig")) sscanf(rest, "%u %u", &gpu->mig[0], &gpu->mig[1]);
  else if (!strcmp(key, "capability")) sscanf(rest, "%u %u", &gpu->capability[0], &gpu->capability[1]);
  else if (!strcmp(key, "architecture")) sscanf(rest, "%u", &gpu->architecture);
  else if (!strcmp(key, "brand")) sscanf(rest, "%u", &gpu->brand);
  else if (!strcmp(key, "process")) add_process(&gpu->compute, rest);
  else if (!strcmp(key, "graphics")) add_process(&gpu->graphics, rest);
  else if (!strcmp(key, "ecc")) gpu->has_ecc = sscanf(rest, "%llu %llu", &gpu->ecc[0], &gpu->ecc[1]) == 2;
  else if (!strcmp(key, "retired")) gpu->has_retired = sscanf(rest, "%u", &gpu->retired) == 1;
  else if (!strcmp(key, "rows")) sscanf(rest, "%u %u %u %u", &gpu->rows[0], &gpu->rows[1], &gpu->rows[2], &gpu->rows[3]);
  else if (!strcmp(key, "clocks")) sscanf(rest, "%llx", &gpu->clocks);
  else if (!strcmp(key, "recovery")) sscanf(rest, "%u", &gpu->recovery);
  else if (!strcmp(key, "link")) add_link(gpu, rest);
  else if (!strcmp(key, "fabric")) gpu->has_fabric = sscanf(rest, "%u %u %x", &gpu->fabric[0], &gpu->fabric[1], &gpu->fabric[2]) == 3;
  else if (!strcmp(key, "use")) parse_pair(&gpu->use, rest);
  else if (!strcmp(key, "power")) parse_pair(&gpu->power, rest);
  else if (!strcmp(key, "temperature")) parse_pair(&gpu->temperature, rest);
  else if (!strcmp(key, "frequency")) parse_pair(&gpu->frequency, rest);
  else if (!strcmp(key, "pcie")) parse_pair(&gpu->pcie, rest);
  else if (!strcmp(key, "nvlink")) parse_pair(&gpu->nvlink, rest);
  else if (!strcmp(key, "instance")) {
    struct counted *counted = &gpu->counted[gpu->counted_count++];
    if (gpu->counted_count > MAX_COUNTED || sscanf(rest, "%u %llu %u", &counted->gi, &counted->uncorrected, &counted->percent) != 3) abort();
  } else if (!strcmp(key, "error")) sscanf(rest, "%d", &gpu->error);
  else if (!strcmp(key, "refuse")) {
    if (gpu->refusal_count < MAX_REFUSALS && sscanf(rest, "%63s %d", refusal.function, &refusal.code) == 2) gpu->refusals[gpu->refusal_count++] = refusal;
  } else if (!strcmp(key, "event")) {
    if (gpu->event_count < MAX_EVENTS && sscanf(rest, "%llu %llx %llu %u %u", &event.serial, &event.type, &event.data, &event.gi, &event.ci) >= 3)
      gpu->events[gpu->event_count++] = event;
  } else if (!parse_mig_line(gpu, key, rest)) { fprintf(stderr, "fake_nvml: unknown line: %s %s\n", key, rest); abort(); }
}

static nvmlReturn_t read_profile(void) {
  static char path[PATH_MAX];
  char line[512], key[32];
  struct gpu *gpu = NULL;
  Dl_info own;
  if (!path[0]) {
    if (!dladdr((void *)read_profile, &own)) abort();
    snprintf(path, sizeof path, "%s", own.dli_fname);
    strcpy(strrchr(path, '/') + 1, "profile");
  }
  FILE *file = fopen(path, "re");
  if (file == NULL) { fprintf(stderr, "fake_nvml: no %s\n", path); abort(); }
  memset(&now, 0, sizeof now);
  while (fgets(line, sizeof line, file) != NULL) {
    line[strcspn(line, "#\n")] = 0;
    int start = 0;
    if (sscanf(line, "%31s %n", key, &start) < 1) continue;
    const char *rest = line + (start ? start : (int)strlen(line));
    if (!strcmp(key, "session")) sscanf(rest, "%d", &now.session);
    else if (!strcmp(key, "driver")) sscanf(rest, "%63s %d", now.driver, &now.cuda);
    else if (!strcmp(key, "gpu")) {
      if (now.count == MAX_GPUS) abort();
      gpu = &now.gpus[now.count++];
      if (!parse_pci(rest, &gpu->address)) abort();
    } else if (gpu != NULL) parse_gpu_line(gpu, key, rest);
  }
  fclose(file);
  read_instances(path);
  return now.session;
}

static nvmlReturn_t begin(void) {
  pthread_mutex_lock(&lock);
  if (starts == 0) return UNINITIALIZED;
  return read_profile();
}

static nvmlReturn_t end(nvmlReturn_t code) { pthread_mutex_unlock(&lock); return code; }

static struct gpu *at(struct pci address) {
  for (unsigned int i = 0; i < now.count; i++)
    if (is_same(now.gpus[i].address, address)) return &now.gpus[i];
  return NULL;
}

static nvmlReturn_t of_device(nvmlDevice_t device, const char *function, struct gpu **gpu) {
  nvmlReturn_t code = begin();
  if (code != OK) return code;
  if (device < handles || device >= handles + handle_count) return INVALID_ARGUMENT;
  *gpu = at(device->address);
  if (*gpu == NULL) return NOT_FOUND;
  if ((*gpu)->error != OK) return (*gpu)->error;
  for (unsigned int i = 0; i < (*gpu)->refusal_count; i++)
    if (!strcmp((*gpu)->refusals[i].function, function)) return (*gpu)->refusals[i].code;
  code = device->gi == UINT_MAX ? OK : of_mig_device(device, function);
  if (code == OK && device->gi != UINT_MAX) describe_mig_device(device, *gpu);
  return code;
}

static nvmlDevice_t handle_of_part(struct pci address, unsigned int gi, unsigned int ci) {
  for (unsigned int i = 0; i < handle_count; i++)
    if (is_same(handles[i].address, address) && handles[i].gi == gi && handles[i].ci == ci) return &handles[i];
  if (handle_count == MAX_HANDLES) abort();
  handles[handle_count] = (struct handle){address, gi, ci};
  return &handles[handle_count++];
}
static nvmlDevice_t handle_of(struct pci address) { return handle_of_part(address, UINT_MAX, UINT_MAX); }

static void fill_pci(struct pci address, nvmlPciInfo_t *info) {
  memset(info, 0, sizeof *info);
  info->domain = address.domain, info->bus = address.bus, info->device = address.device;
  snprintf(info->busIdLegacy, sizeof info->busIdLegacy, "%04X:%02X:%02X.%X", address.domain & 0xffff, address.bus & 0xff, address.device & 0xff, address.function & 7);
  snprintf(info->busId, sizeof info->busId, "%08X:%02X:%02X.%X", address.domain, address.bus & 0xff, address.device & 0xff, address.function & 7);
}

#define DEVICE_CALL(...) struct gpu *gpu = NULL; nvmlReturn_t code = of_device(device, __func__, &gpu); if (code != OK) return end(code)

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
  (void)flags;
  pthread_mutex_lock(&lock);
  nvmlReturn_t code = read_profile();
  if (code == OK) starts++;
  return end(code);
}
nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
nvmlReturn_t nvmlShutdown(void) {
  nvmlReturn_t code = begin();
  if (code != UNINITIALIZED) starts--;
  return end(code);
}
const char *nvmlErrorString(nvmlReturn_t code) {
  switch (code) {
    case OK: return "Success";
    case UNINITIALIZED: return "Uninitialized"; case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported"; case NOT_FOUND: return "Not Found";
    case 9: return "Driver Not Loaded";
    case TIMEOUT: return "Timeout";
    case 15: return "GPU is lost"; case 16: return "GPU requires reset";
    case 18: return "Driver/library version mismatch";
    case IN_USE: return "In use by another client"; case INSUFFICIENT_RESOURCES: return "Insufficient Resources";
    default: return "Unknown Error";
  }
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) { nvmlReturn_t code = begin(); if (code == OK) *version = now.cuda; return end(code); }
nvmlReturn_t nvmlSystemGetDriverVersion(char *text, unsigned int length) {
  nvmlReturn_t code = begin();
  if (code == OK) snprintf(text, length, "%s", now.driver);
  return end(code);
}
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) { nvmlReturn_t code = begin(); if (code == OK) *count = now.count; return end(code); }
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
  nvmlReturn_t code = begin();
  if (code == OK && index >= now.count) code = INVALID_ARGUMENT;
  if (code == OK) *device = handle_of(now.gpus[index].address);
  return end(code);
}
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *text, nvmlDevice_t *device) {
  struct pci address = {0};
  nvmlReturn_t code = begin();
  if (code == OK && !parse_pci(text, &address)) code = INVALID_ARGUMENT;
  if (code == OK && at(address) == NULL) code = NOT_FOUND;
  if (code == OK) *device = handle_of(address);
  return end(code);
}
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *info) { DEVICE_CALL(); fill_pci(gpu->address, info); return end(OK); }
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
  DEVICE_CALL();
  *memory = (nvmlMemory_t){.total = gpu->memory_total, .used = gpu->memory_used, .free = gpu->memory_total - gpu->memory_used};
  return end(OK);
}
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
  DEVICE_CALL();
  memory->total = gpu->memory_total, memory->used = gpu->memory_used, memory->free = gpu->memory_total - gpu->memory_used, memory->reserved = 0;
  return end(OK);
}
nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor) { DEVICE_CALL(); *minor = gpu->minor; return end(OK); }
nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) { DEVICE_CALL(); *index = (unsigned int)(gpu - now.gpus); return end(OK); }
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned int length) { DEVICE_CALL(); snprintf(text, length, "%s", gpu->uuid); return end(OK); }
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned int length) { DEVICE_CALL(); snprintf(text, length, "%s", gpu->name); return end(OK); }
nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned int *architecture) { DEVICE_CALL(); *architecture = gpu->architecture; return end(OK); }
nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, unsigned int *brand) { DEVICE_CALL(); *brand = gpu->brand; return end(OK); }
nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
  DEVICE_CALL();
  *major = (int)gpu->capability[0], *minor = (int)gpu->capability[1];
  return end(OK);
}
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
  DEVICE_CALL();
  *current = gpu->mig[0], *pending = gpu->mig[1];
  return end(OK);
}
static nvmlReturn_t give_processes(const struct processes *processes, unsigned int *count, nvmlProcessInfo_t *list) {
  unsigned int room = *count;
  *count = processes->count;
  if (processes->count == 0) return OK;
  if (list == NULL || room < processes->count) return INSUFFICIENT_SIZE;
  memcpy(list, processes->list, processes->count * sizeof *list);
  return OK;
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *list) {
  DEVICE_CALL();
  return end(give_processes(&gpu->compute, count, list));
}
nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *list) {
  DEVICE_CALL();
  return end(give_processes(&gpu->graphics, count, list));
}
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int type, int counter, unsigned long long *count) {
  DEVICE_CALL();
  if (!gpu->has_ecc) return end(NOT_SUPPORTED);
  if (type < 0 || type > 1 || counter < 0 || counter > 1) return end(INVALID_ARGUMENT);
  *count = gpu->ecc[type];
  return end(OK);
}
nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t device, int *is_pending) {
  DEVICE_CALL();
  if (!gpu->has_retired) return end(NOT_SUPPORTED);
  *is_pending = (int)gpu->retired;
  return end(OK);
}
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned int *corrected, unsigned int *uncorrected, unsigned int *pending, unsigned int *failed) {
  DEVICE_CALL();
  *corrected = gpu->rows[0], *uncorrected = gpu->rows[1], *pending = gpu->rows[2], *failed = gpu->rows[3];
  return end(OK);
}
nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons) { DEVICE_CALL(); *reasons = gpu->clocks; return end(OK); }
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *use) {
  DEVICE_CALL();
  if (!gpu->use.is_known || gpu->mig[0]) return end(NOT_SUPPORTED);
  use->gpu = (unsigned int)gpu->use.first, use->memory = (unsigned int)gpu->use.second;
  return end(OK);
}
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
  DEVICE_CALL();
  if (!gpu->power.is_known) return end(NOT_SUPPORTED);
  *milliwatts = (unsigned int)gpu->power.first;
  return end(OK);
}
nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules) {
  DEVICE_CALL();
  if (!gpu->power.is_known) return end(NOT_SUPPORTED);
  *millijoules = gpu->power.second;
  return end(OK);
}
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned int *celsius) {
  DEVICE_CALL();
  if (sensor != 0) return end(INVALID_ARGUMENT);
  if (!gpu->temperature.is_known) return end(NOT_SUPPORTED);
  *celsius = (unsigned int)gpu->temperature.first;
  return end(OK);
}
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, int kind, unsigned int *mhz) {
  DEVICE_CALL();
  if (kind != 1 && kind != 2) return end(INVALID_ARGUMENT); /* nvmlClockType_t: SM 1, MEM 2 */
  if (!gpu->frequency.is_known) return end(NOT_SUPPORTED);
  *mhz = (unsigned int)(kind == 1 ? gpu->frequency.first : gpu->frequency.second);
  return end(OK);
}
static void give_count(const struct pair *pair, int is_second, nvmlFieldValue_t *value) {
  value->valueType = VALUE_UNSIGNED_LONG_LONG;
  value->nvmlReturn = pair->is_known ? OK : NOT_SUPPORTED;
  value->value.ullVal = is_second ? pair->second : pair->first;
}
static void give_field(const struct gpu *gpu, nvmlFieldValue_t *value) {
  value->valueType = VALUE_UNSIGNED_INT;
  value->nvmlReturn = OK;
  switch (value->fieldId) {
    case FIELD_NVLINK_SPEED_MBPS_COMMON: value->value.uiVal = 25000; return;
    case FIELD_RECOVERY_ACTION: value->value.uiVal = gpu->recovery; return;
    case FIELD_MEMORY_TEMP: value->nvmlReturn = gpu->temperature.is_known ? OK : NOT_SUPPORTED; value->value.uiVal = (unsigned int)gpu->temperature.second; return;
    case FIELD_PCIE_TX_BYTES: case FIELD_PCIE_RX_BYTES: give_count(&gpu->pcie, value->fieldId == FIELD_PCIE_RX_BYTES, value); return;
    case FIELD_NVLINK_DATA_TX: case FIELD_NVLINK_DATA_RX:
      give_count(&gpu->nvlink, value->fieldId == FIELD_NVLINK_DATA_RX, value);
      if (value->scopeId != UINT_MAX) value->nvmlReturn = NOT_SUPPORTED;
      return;
    default: value->nvmlReturn = NOT_SUPPORTED;
  }
}
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
  DEVICE_CALL();
  for (int i = 0; i < count; i++) give_field(gpu, &values[i]);
  return end(OK);
}
#define LINK_CALL() DEVICE_CALL(); if (number >= gpu->link_count) return end(INVALID_ARGUMENT); const struct link *link = &gpu->links[number]
nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned int number, unsigned int *is_up) { LINK_CALL(); *is_up = (unsigned int)link->is_up; return end(OK); }
nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned int number, unsigned int *type) {
  LINK_CALL();
  *type = link->is_switch ? 2 : 0; /* nvmlIntNvLinkDeviceType_t: GPU 0, IBMNPU 1, SWITCH 2 */
  return end(OK);
}
nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned int number, nvmlPciInfo_t *info) {
  LINK_CALL();
  if (!link->is_up || link->is_switch) return end(NOT_SUPPORTED);
  fill_pci(link->peer, info);
  return end(OK);
}
nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned int number, unsigned int counter, unsigned long long *count) {
  LINK_CALL();
  if (counter >= 5) return end(INVALID_ARGUMENT);
  *count = link->errors[counter];
  return end(OK);
}
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfo_v2_t *info) {
  DEVICE_CALL();
  if (!gpu->has_fabric) return end(NOT_SUPPORTED);
  if (info->version != (sizeof *info | 2u << 24)) return end(VERSION_MISMATCH);
  memset(info->clusterUuid, 0x5a, sizeof info->clusterUuid);
  info->cliqueId = 1, info->state = gpu->fabric[0], info->status = (nvmlReturn_t)gpu->fabric[1], info->healthMask = gpu->fabric[2];
  return end(OK);
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
  nvmlReturn_t code = begin();
  if (code != OK) return end(code);
  for (int i = 0; i < MAX_SETS; i++)
    if (!sets[i].is_used) { memset(&sets[i], 0, sizeof sets[i]); sets[i].is_used = 1; *set = &sets[i]; return end(OK); }
  return end(INSUFFICIENT_SIZE);
}
nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) { nvmlReturn_t code = begin(); set->is_used = 0; return end(code); }
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
  DEVICE_CALL();
  if (!set->is_used || set->device_count == MAX_GPUS) return end(INVALID_ARGUMENT);
  unsigned long long seen = 0;
  for (unsigned int i = 0; i < gpu->event_count; i++)
    if (gpu->events[i].serial > seen) seen = gpu->events[i].serial;
  set->devices[set->device_count].device = device;
  set->devices[set->device_count].types = types;
  set->devices[set->device_count++].seen = seen;
  return end(OK);
}
/* Give the oldest event that this set has not given yet; the caller has the lock. */
static nvmlReturn_t take_event(nvmlEventSet_t set, nvmlEventData_t *data) {
  for (unsigned int d = 0; d < set->device_count; d++) {
    const struct gpu *gpu = at(set->devices[d].device->address);
    const struct event *next = NULL;
    for (unsigned int i = 0; gpu != NULL && i < gpu->event_count; i++) {
      const struct event *event = &gpu->events[i];
      if (event->serial > set->devices[d].seen && (event->type & set->devices[d].types) && (next == NULL || event->serial < next->serial)) next = event;
    }
    if (next == NULL) continue;
    set->devices[d].seen = next->serial;
    *data = (nvmlEventData_t){set->devices[d].device, next->type, next->data, next->gi, next->ci};
    return OK;
  }
  return TIMEOUT;
}
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms) {
  const struct timespec pause = {.tv_nsec = 5000000};
  for (unsigned int waited_ms = 0;; waited_ms += 5) {
    nvmlReturn_t code = begin();
    if (code == OK) code = set->is_used ? take_event(set, data) : INVALID_ARGUMENT;
    end(code);
    if (code != TIMEOUT || waited_ms >= timeout_ms) return code;
    nanosleep(&pause, NULL);
  }
}

#include "fake_mig.c"
