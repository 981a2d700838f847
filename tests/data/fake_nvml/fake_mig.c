/* MIG of the libnvidia-ml of a profile: profiles, placements, GPU instances, compute instances and MIG device handles. Included by fake_nvml.c, whose statics it uses.
 *
 * Lines of a GPU in the file `profile`:
 *   migprofile INDEX ID SLICES COUNT SMS COPY DECODERS ENCODERS JPEG OFA MIB NAME SIZE START...   what NVML tells of a GPU instance profile; NAME as `1g.10gb+me`
 *   engines SMS COPY DECODERS ENCODERS JPEG OFA                                                    what the GPU has in all
 * The instances that exist stand in the file `mig-state` beside it, so that they outlive the process that made them, as in the driver:
 *   gi ADDRESS GI PROFILE START SIZE
 *   ci ADDRESS GI CI SLICES START SERIAL
 * A GPU instance can be made where its memory slices are free, as long as its profile's count and the GPU's engines last. The numbers of GPU instances follow from the place,
 * as in the driver: 0 the whole, 1 and 2 the halves, 3 to 6 the quarters, 7 to 14 the slices. A compute instance's UUID is another one each time it is made.
 * Source: NVML API reference, "Multi Instance GPU Management"; MIG User Guide, "Partitioning" and "Creating GPU instances".
 */
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

enum { MAX_INSTANCES = 128, SMS = 0, COPY, DECODERS, ENCODERS, JPEG, OFA, ENGINES, MEMORY_SLICES = 8 };

struct gpu_instance { struct pci address; unsigned int gi, profile, start, size; };
struct compute_instance { struct pci address; unsigned int gi, ci, slices, start; unsigned long long serial; };

static struct { unsigned int gi_count, ci_count; struct gpu_instance gis[MAX_INSTANCES]; struct compute_instance cis[MAX_INSTANCES]; } made;
/* What callers hold; only address and numbers count. */
static struct gpu_instance gi_handles[MAX_HANDLES];
static struct compute_instance ci_handles[MAX_HANDLES];
static unsigned int gi_handle_count, ci_handle_count;
static char state_path[PATH_MAX], lock_path[PATH_MAX];
/* nvmlComputeInstanceProfile: 1, 2, 3, 4, 7 slices; its number is its id, too. */
static const unsigned int COMPUTE_SLICES[] = {1, 2, 3, 4, 7};
enum { COMPUTE_PROFILES = 5, MEMORY_LOCATION_SRAM = 7, GPM_GRAPHICS_UTIL = 1 };

static int parse_mig_line(struct gpu *gpu, const char *key, const char *rest) {
  if (!strcmp(key, "engines")) return sscanf(rest, "%u %u %u %u %u %u", &gpu->engines[0], &gpu->engines[1], &gpu->engines[2], &gpu->engines[3], &gpu->engines[4], &gpu->engines[5]) == ENGINES;
  if (strcmp(key, "migprofile") || gpu->profile_count == MAX_PROFILES) return 0;
  struct mig_profile *p = &gpu->profiles[gpu->profile_count++];
  int at = 0, next = 0;
  if (sscanf(rest, "%u %u %u %u %u %u %u %u %u %u %llu %63s %u %n", &p->index, &p->id, &p->slices, &p->count, &p->engines[0], &p->engines[1], &p->engines[2], &p->engines[3],
             &p->engines[4], &p->engines[5], &p->memory_mb, p->name, &p->size, &at) != 13) return 0;
  while (p->start_count < MAX_STARTS && sscanf(rest + at, "%u %n", &p->starts[p->start_count], &next) == 1) { p->start_count++; at += next; }
  return 1;
}

static void read_instances(const char *profile_path) {
  char line[256], address[64];
  snprintf(state_path, sizeof state_path, "%s", profile_path);
  strcpy(strrchr(state_path, '/') + 1, "mig-state");
  snprintf(lock_path, sizeof lock_path, "%s", profile_path);
  strcpy(strrchr(lock_path, '/') + 1, "mig-lock");
  memset(&made, 0, sizeof made);
  FILE *file = fopen(state_path, "re");
  if (file == NULL) return;
  while (fgets(line, sizeof line, file) != NULL) {
    struct gpu_instance g = {0};
    struct compute_instance c = {0};
    if (sscanf(line, "gi %63s %u %u %u %u", address, &g.gi, &g.profile, &g.start, &g.size) == 5 && parse_pci(address, &g.address)) made.gis[made.gi_count++] = g;
    else if (sscanf(line, "ci %63s %u %u %u %u %llu", address, &c.gi, &c.ci, &c.slices, &c.start, &c.serial) == 6 && parse_pci(address, &c.address)) made.cis[made.ci_count++] = c;
    else abort();
  }
  fclose(file);
}

static void write_instances(void) {
  char path[PATH_MAX + 8];
  snprintf(path, sizeof path, "%s.new", state_path);
  FILE *file = fopen(path, "we");
  if (file == NULL) abort();
#define ADDRESS(a) (a).domain, (a).bus, (a).device, (a).function
  for (unsigned int i = 0; i < made.gi_count; i++)
    fprintf(file, "gi %04x:%02x:%02x.%x %u %u %u %u\n", ADDRESS(made.gis[i].address), made.gis[i].gi, made.gis[i].profile, made.gis[i].start, made.gis[i].size);
  for (unsigned int i = 0; i < made.ci_count; i++)
    fprintf(file, "ci %04x:%02x:%02x.%x %u %u %u %u %llu\n", ADDRESS(made.cis[i].address), made.cis[i].gi, made.cis[i].ci, made.cis[i].slices, made.cis[i].start, made.cis[i].serial);
  if (fclose(file) || rename(path, state_path)) abort();
}

/* Several processes change the state: who changes it has the lock file from before it is read until it is written. */
static int take_lock(void) {
  int file = lock_path[0] ? open(lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
  if (file >= 0) flock(file, LOCK_EX);
  return file;
}
static nvmlReturn_t let_go(int file, nvmlReturn_t code) {
  end(code);
  if (file >= 0) close(file);
  return code;
}

static struct gpu_instance *find_gi(struct pci address, unsigned int gi) {
  for (unsigned int i = 0; i < made.gi_count; i++)
    if (is_same(made.gis[i].address, address) && made.gis[i].gi == gi) return &made.gis[i];
  return NULL;
}
static struct compute_instance *find_ci(struct pci address, unsigned int gi, unsigned int ci) {
  for (unsigned int i = 0; i < made.ci_count; i++)
    if (is_same(made.cis[i].address, address) && made.cis[i].gi == gi && made.cis[i].ci == ci) return &made.cis[i];
  return NULL;
}
static struct mig_profile *profile_by_id(struct gpu *gpu, unsigned int id) {
  for (unsigned int i = 0; i < gpu->profile_count; i++)
    if (gpu->profiles[i].id == id) return &gpu->profiles[i];
  return NULL;
}
static nvmlGpuInstance_t gi_handle(const struct gpu_instance *g) {
  for (unsigned int i = 0; i < gi_handle_count; i++)
    if (is_same(gi_handles[i].address, g->address) && gi_handles[i].gi == g->gi) return &gi_handles[i];
  gi_handles[gi_handle_count] = *g;
  return &gi_handles[gi_handle_count++];
}
static nvmlComputeInstance_t ci_handle(const struct compute_instance *c) {
  for (unsigned int i = 0; i < ci_handle_count; i++)
    if (is_same(ci_handles[i].address, c->address) && ci_handles[i].gi == c->gi && ci_handles[i].ci == c->ci) return &ci_handles[i];
  ci_handles[ci_handle_count] = *c;
  return &ci_handles[ci_handle_count++];
}

/* The number that the driver gives to the instance of so many memory slices at a place. */
static unsigned int gi_number(unsigned int start, unsigned int size) { return size == 8 ? 0 : size == 4 ? 1 + start / 4 : size == 2 ? 3 + start / 2 : 7 + start; }

static int fits(const struct gpu *gpu, const struct mig_profile *profile, unsigned int start) {
  unsigned int used[ENGINES] = {0}, count = 0, is_place = 0;
  for (unsigned int i = 0; i < profile->start_count; i++) is_place |= profile->starts[i] == start;
  for (unsigned int i = 0; i < made.gi_count; i++) {
    const struct gpu_instance *g = &made.gis[i];
    const struct mig_profile *other = profile_by_id((struct gpu *)gpu, g->profile);
    if (!is_same(g->address, gpu->address)) continue;
    if (g->start < start + profile->size && start < g->start + g->size) return 0;
    count += g->profile == profile->id;
    for (int e = 0; e < ENGINES; e++) used[e] += other ? other->engines[e] : 0;
  }
  for (int e = 0; e < ENGINES; e++)
    if (used[e] + profile->engines[e] > gpu->engines[e]) return 0;
  return is_place && count < profile->count;
}

static int has_process(const struct gpu *gpu, unsigned int gi, unsigned int ci) {
  for (unsigned int i = 0; i < gpu->compute.count; i++)
    if (gpu->compute.list[i].gpuInstanceId == gi && (ci == UINT_MAX || gpu->compute.list[i].computeInstanceId == ci)) return 1;
  return 0;
}

/* MIG devices answer these functions alone. */
static nvmlReturn_t of_mig_device(nvmlDevice_t device, const char *function) {
  static const char *const answered[] = {"nvmlDeviceGetUUID", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetAttributes_v2", "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", "nvmlDeviceIsMigDeviceHandle",
    "nvmlDeviceGetMemoryErrorCounter", "nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v3"};
  if (find_ci(device->address, device->gi, device->ci) == NULL) return NOT_FOUND;
  for (size_t i = 0; i < sizeof answered / sizeof *answered; i++)
    if (!strcmp(answered[i], function)) return OK;
  return NOT_SUPPORTED;
}

/* Change the copy of a GPU, which is read anew at each call, into what its MIG device says of itself. */
static void describe_mig_device(nvmlDevice_t device, struct gpu *gpu) {
  const struct gpu_instance *g = find_gi(device->address, device->gi);
  const struct compute_instance *c = find_ci(device->address, device->gi, device->ci);
  const struct mig_profile *profile = profile_by_id(gpu, g->profile);
  struct processes own = {0};
  size_t length = strlen(gpu->name);
  snprintf(gpu->uuid, sizeof gpu->uuid, "MIG-%08llx-%04x-%04x-%04x-%012x", c->serial, gpu->minor, c->gi, c->ci, g->profile);
  snprintf(gpu->name + length, sizeof gpu->name - length, c->slices == profile->slices ? " MIG %s" : " MIG %2$uc.%1$s", profile->name, c->slices);
  gpu->memory_total = profile->memory_mb << 20;
  gpu->memory_used = 0;
  for (unsigned int i = 0; i < gpu->compute.count; i++) {
    if (gpu->compute.list[i].gpuInstanceId != device->gi) continue;
    gpu->memory_used += gpu->compute.list[i].usedGpuMemory;
    if (gpu->compute.list[i].computeInstanceId == device->ci) own.list[own.count++] = gpu->compute.list[i];
  }
  gpu->compute = own;
  gpu->graphics.count = 0;
}

static nvmlReturn_t fill_profile(const struct mig_profile *p, nvmlGpuInstanceProfileInfo_v2_t *info) {
  if (info->version != (sizeof *info | 2u << 24)) return VERSION_MISMATCH;
  info->id = p->id, info->isP2pSupported = 0, info->sliceCount = p->slices, info->instanceCount = p->count, info->memorySizeMB = p->memory_mb;
  info->multiprocessorCount = p->engines[SMS], info->copyEngineCount = p->engines[COPY], info->decoderCount = p->engines[DECODERS];
  info->encoderCount = p->engines[ENCODERS], info->jpegCount = p->engines[JPEG], info->ofaCount = p->engines[OFA];
  snprintf(info->name, sizeof info->name, "MIG %s", p->name);
  return OK;
}
nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int index, nvmlGpuInstanceProfileInfo_v2_t *info) {
  DEVICE_CALL();
  for (unsigned int i = 0; i < gpu->profile_count; i++)
    if (gpu->profiles[i].index == index) return end(fill_profile(&gpu->profiles[i], info));
  return end(NOT_SUPPORTED);
}
#define PROFILE_CALL(id) DEVICE_CALL(); struct mig_profile *profile = profile_by_id(gpu, id); if (profile == NULL) return end(gpu->profile_count ? INVALID_ARGUMENT : NOT_SUPPORTED)
nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned int id, nvmlGpuInstanceProfileInfo_v2_t *info) { PROFILE_CALL(id); return end(fill_profile(profile, info)); }
nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned int id, nvmlGpuInstancePlacement_t *placements, unsigned int *count) {
  PROFILE_CALL(id);
  if (placements != NULL && *count < profile->start_count) return end(INSUFFICIENT_SIZE);
  *count = profile->start_count;
  for (unsigned int i = 0; placements != NULL && i < profile->start_count; i++) placements[i] = (nvmlGpuInstancePlacement_t){profile->starts[i], profile->size};
  return end(OK);
}
nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned int id, unsigned int *count) {
  PROFILE_CALL(id);
  if (gpu->mig[0] != 1) return end(NOT_SUPPORTED);
  unsigned int before = made.gi_count;
  *count = 0;
  for (unsigned int i = 0; i < profile->start_count; i++)
    if (fits(gpu, profile, profile->starts[i])) {
      made.gis[made.gi_count++] = (struct gpu_instance){gpu->address, UINT_MAX, id, profile->starts[i], profile->size};
      (*count)++;
    }
  made.gi_count = before;
  return end(OK);
}
static nvmlReturn_t create_gi(nvmlDevice_t device, unsigned int id, const nvmlGpuInstancePlacement_t *wanted, nvmlGpuInstance_t *instance) {
  int file = take_lock();
  struct gpu *gpu = NULL;
  nvmlReturn_t code = of_device(device, "nvmlDeviceCreateGpuInstanceWithPlacement", &gpu);
  struct mig_profile *profile = code == OK ? profile_by_id(gpu, id) : NULL;
  if (code == OK && gpu->mig[0] != 1) code = NOT_SUPPORTED;
  if (code == OK && (profile == NULL || (wanted != NULL && wanted->size != profile->size))) code = INVALID_ARGUMENT;
  if (code != OK) return let_go(file, code);
  for (unsigned int i = 0; i < profile->start_count; i++) {
    unsigned int start = profile->starts[i];
    if ((wanted != NULL && wanted->start != start) || !fits(gpu, profile, start)) continue;
    made.gis[made.gi_count] = (struct gpu_instance){gpu->address, gi_number(start, profile->size), id, start, profile->size};
    *instance = gi_handle(&made.gis[made.gi_count++]);
    write_instances();
    return let_go(file, OK);
  }
  return let_go(file, INSUFFICIENT_RESOURCES);
}
nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned int id, const nvmlGpuInstancePlacement_t *placement, nvmlGpuInstance_t *instance) {
  return create_gi(device, id, placement, instance);
}
nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instance) { return create_gi(device, id, NULL, instance); }
nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instances, unsigned int *count) {
  PROFILE_CALL(id);
  *count = 0;
  for (unsigned int i = 0; i < made.gi_count; i++)
    if (is_same(made.gis[i].address, gpu->address) && made.gis[i].profile == id) instances[(*count)++] = gi_handle(&made.gis[i]);
  return end(gpu->mig[0] == 1 ? OK : NOT_SUPPORTED);
}
nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int gi, nvmlGpuInstance_t *instance) {
  DEVICE_CALL();
  struct gpu_instance *g = find_gi(gpu->address, gi);
  if (gpu->mig[0] != 1 || g == NULL) return end(gpu->mig[0] == 1 ? NOT_FOUND : NOT_SUPPORTED);
  *instance = gi_handle(g);
  return end(OK);
}
/* Find an instance and its GPU as they are now; the caller has the lock. */
static nvmlReturn_t of_gi(nvmlGpuInstance_t instance, const char *function, struct gpu **gpu, struct gpu_instance **g) {
  struct gpu_instance wanted = *instance;
  nvmlReturn_t code = of_device(handle_of(wanted.address), function, gpu);
  if (code != OK) return code;
  *g = find_gi(wanted.address, wanted.gi);
  return *g == NULL ? NOT_FOUND : OK;
}
#define GI_CALL() struct gpu *gpu = NULL; struct gpu_instance *g = NULL; nvmlReturn_t code = of_gi(instance, __func__, &gpu, &g)
nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info) {
  GI_CALL();
  if (code == OK) *info = (nvmlGpuInstanceInfo_t){handle_of(g->address), g->gi, g->profile, {g->start, g->size}};
  return end(code);
}
nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t instance) {
  int file = take_lock();
  GI_CALL();
  for (unsigned int i = 0; code == OK && i < made.ci_count; i++)
    if (is_same(made.cis[i].address, g->address) && made.cis[i].gi == g->gi) code = IN_USE;
  if (code == OK && has_process(gpu, g->gi, UINT_MAX)) code = IN_USE;
  if (code != OK) return let_go(file, code);
  *g = made.gis[--made.gi_count];
  write_instances();
  return let_go(file, OK);
}
nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t instance, unsigned int index, unsigned int engines, nvmlComputeInstanceProfileInfo_v2_t *info) {
  GI_CALL();
  if (code != OK) return end(code);
  const struct mig_profile *profile = profile_by_id(gpu, g->profile);
  if (index >= COMPUTE_PROFILES || engines != 0) return end(INVALID_ARGUMENT);
  if (COMPUTE_SLICES[index] > profile->slices) return end(NOT_SUPPORTED);
  if (info->version != (sizeof *info | 2u << 24)) return end(VERSION_MISMATCH);
  info->id = index, info->sliceCount = COMPUTE_SLICES[index], info->instanceCount = profile->slices / COMPUTE_SLICES[index];
  info->multiprocessorCount = profile->engines[SMS] * COMPUTE_SLICES[index] / profile->slices;
  info->sharedCopyEngineCount = profile->engines[COPY], info->sharedDecoderCount = profile->engines[DECODERS], info->sharedEncoderCount = profile->engines[ENCODERS];
  info->sharedJpegCount = profile->engines[JPEG], info->sharedOfaCount = profile->engines[OFA];
  snprintf(info->name, sizeof info->name, COMPUTE_SLICES[index] == profile->slices ? "MIG %s" : "MIG %2$uc.%1$s", profile->name, COMPUTE_SLICES[index]);
  return end(OK);
}
nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t instance, unsigned int id, nvmlComputeInstance_t *compute) {
  int file = take_lock();
  GI_CALL();
  unsigned int taken = 0, ci = 0;
  unsigned long long serial = 0;
  if (code == OK && (id >= COMPUTE_PROFILES || COMPUTE_SLICES[id] > profile_by_id(gpu, g->profile)->slices)) code = INVALID_ARGUMENT;
  if (code != OK) return let_go(file, code);
  for (unsigned int i = 0; i < made.ci_count; i++) {
    if (made.cis[i].serial > serial) serial = made.cis[i].serial;
    if (!is_same(made.cis[i].address, g->address) || made.cis[i].gi != g->gi) continue;
    for (unsigned int s = 0; s < made.cis[i].slices; s++) taken |= 1u << (made.cis[i].start + s);
  }
  while (find_ci(g->address, g->gi, ci) != NULL) ci++;
  for (unsigned int start = 0, slices = COMPUTE_SLICES[id]; start + slices <= profile_by_id(gpu, g->profile)->slices; start++) {
    if (taken & ((1u << slices) - 1) << start) continue;
    struct timespec clock;
    clock_gettime(CLOCK_REALTIME, &clock);
    serial = serial + 1 > (unsigned long long)clock.tv_nsec ? serial + 1 : (unsigned long long)clock.tv_nsec;
    made.cis[made.ci_count] = (struct compute_instance){g->address, g->gi, ci, slices, start, serial};
    *compute = ci_handle(&made.cis[made.ci_count++]);
    write_instances();
    return let_go(file, OK);
  }
  return let_go(file, INSUFFICIENT_RESOURCES);
}
nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t instance, unsigned int id, nvmlComputeInstance_t *computes, unsigned int *count) {
  GI_CALL();
  *count = 0;
  for (unsigned int i = 0; code == OK && i < made.ci_count; i++)
    if (id < COMPUTE_PROFILES && is_same(made.cis[i].address, g->address) && made.cis[i].gi == g->gi && made.cis[i].slices == COMPUTE_SLICES[id]) computes[(*count)++] = ci_handle(&made.cis[i]);
  return end(code);
}
nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned int ci, nvmlComputeInstance_t *compute) {
  GI_CALL();
  struct compute_instance *c = code == OK ? find_ci(g->address, g->gi, ci) : NULL;
  if (code == OK && c == NULL) code = NOT_FOUND;
  if (code == OK) *compute = ci_handle(c);
  return end(code);
}
static nvmlReturn_t of_ci(nvmlComputeInstance_t compute, const char *function, struct gpu **gpu, struct compute_instance **c) {
  struct compute_instance wanted = *compute;
  nvmlReturn_t code = of_device(handle_of(wanted.address), function, gpu);
  if (code != OK) return code;
  *c = find_ci(wanted.address, wanted.gi, wanted.ci);
  return *c == NULL ? NOT_FOUND : OK;
}
nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t compute, nvmlComputeInstanceInfo_t *info) {
  struct gpu *gpu = NULL;
  struct compute_instance *c = NULL;
  nvmlReturn_t code = of_ci(compute, __func__, &gpu, &c);
  if (code != OK) return end(code);
  unsigned int id = 0;
  while (COMPUTE_SLICES[id] != c->slices) id++;
  *info = (nvmlComputeInstanceInfo_t){handle_of_part(c->address, c->gi, c->ci), gi_handle(find_gi(c->address, c->gi)), c->ci, id, {c->start, c->slices}};
  return end(OK);
}
nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t compute) {
  int file = take_lock();
  struct gpu *gpu = NULL;
  struct compute_instance *c = NULL;
  nvmlReturn_t code = of_ci(compute, __func__, &gpu, &c);
  if (code == OK && has_process(gpu, c->gi, c->ci)) code = IN_USE;
  if (code != OK) return let_go(file, code);
  *c = made.cis[--made.ci_count];
  write_instances();
  return let_go(file, OK);
}
nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig) { DEVICE_CALL(); *is_mig = device->gi != UINT_MAX; return end(OK); }
nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id) { DEVICE_CALL(); *id = device->gi; return end(device->gi == UINT_MAX ? NOT_SUPPORTED : OK); }
nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id) { DEVICE_CALL(); *id = device->ci; return end(device->gi == UINT_MAX ? NOT_SUPPORTED : OK); }
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count) { DEVICE_CALL(); *count = gpu->profile_count ? 7 : 0; return end(OK); }
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig) {
  DEVICE_CALL();
  for (unsigned int i = 0; i < made.ci_count; i++)
    if (is_same(made.cis[i].address, gpu->address) && index-- == 0) { *mig = handle_of_part(gpu->address, made.cis[i].gi, made.cis[i].ci); return end(OK); }
  return end(NOT_FOUND);
}
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
  nvmlReturn_t code = begin();
  for (unsigned int i = 0; code == OK && i < now.count; i++)
    if (!strcmp(now.gpus[i].uuid, uuid)) { *device = handle_of(now.gpus[i].address); return end(now.gpus[i].error); }
  for (unsigned int i = 0; code == OK && i < made.ci_count; i++) {
    nvmlDevice_t mig = handle_of_part(made.cis[i].address, made.cis[i].gi, made.cis[i].ci);
    struct gpu copy = *at(mig->address);
    describe_mig_device(mig, &copy);
    if (!strcmp(copy.uuid, uuid)) { *device = mig; return end(copy.error); }
  }
  return end(code == OK ? NOT_FOUND : code);
}
nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device) {
  struct gpu *gpu = NULL;
  nvmlReturn_t code = of_device(mig, __func__, &gpu);
  if (code == OK) *device = handle_of(gpu->address);
  return end(code);
}
nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *a) {
  DEVICE_CALL();
  if (device->gi == UINT_MAX) return end(NOT_SUPPORTED);
  const struct mig_profile *p = profile_by_id(gpu, find_gi(device->address, device->gi)->profile);
  const struct compute_instance *c = find_ci(device->address, device->gi, device->ci);
  *a = (nvmlDeviceAttributes_t){p->engines[SMS] * c->slices / p->slices, p->engines[COPY], p->engines[DECODERS], p->engines[ENCODERS], p->engines[JPEG], p->engines[OFA],
                                p->slices, c->slices, p->memory_mb};
  return end(OK);
}

/* What an instance counts: errors by its MIG device, and its use by two samples of the GPU, which here have the use of their moment. */
struct sample { int is_taken; unsigned int percent; };
static const struct counted *counted_of(const struct gpu *gpu, unsigned int gi) {
  for (unsigned int i = 0; i < gpu->counted_count; i++)
    if (gpu->counted[i].gi == gi) return &gpu->counted[i];
  return NULL;
}
nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, int type, int counter, int location, unsigned long long *count) {
  DEVICE_CALL();
  const struct counted *counted = device->gi == UINT_MAX ? NULL : counted_of(gpu, device->gi);
  if (counted == NULL || type != 1 || counter != 0 || location != MEMORY_LOCATION_SRAM) return end(NOT_SUPPORTED);
  *count = counted->uncorrected;
  return end(OK);
}
nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support) {
  DEVICE_CALL();
  support->isSupportedDevice = gpu->counted_count > 0;
  return end(support->version == 1 ? OK : VERSION_MISMATCH);
}
nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample) { *sample = calloc(1, sizeof **sample); return OK; }
nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample) { free(sample); return OK; }
nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned int gi, nvmlGpmSample_t sample) {
  DEVICE_CALL();
  const struct counted *counted = counted_of(gpu, gi);
  if (device->gi != UINT_MAX || counted == NULL) return end(INVALID_ARGUMENT);
  *sample = (struct sample){1, counted->percent};
  return end(OK);
}
nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get) {
  if (get->version != 1) return VERSION_MISMATCH;
  if (get->sample1 == NULL || get->sample2 == NULL || !get->sample1->is_taken || !get->sample2->is_taken) return INVALID_ARGUMENT;
  for (unsigned int i = 0; i < get->numMetrics; i++) {
    get->metrics[i].nvmlReturn = get->metrics[i].metricId == GPM_GRAPHICS_UTIL ? OK : NOT_SUPPORTED;
    get->metrics[i].value = get->sample2->percent;
  }
  return OK;
}
