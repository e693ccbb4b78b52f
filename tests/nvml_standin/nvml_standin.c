/* A stand-in for libnvidia-ml.so.1 that plays back a power profile, in real time.
 *
 * The real module pynvml loads it through LD_LIBRARY_PATH. The environment variable NVML_STANDIN
 * names a text file with one knob a line ('#' starts a comment; times are seconds since nvmlInit,
 * GPU -1 means every GPU):
 *
 *   gpus N                     number of GPUs (1)
 *   uuid GPU TEXT              identity (GPU-standin-<index>)
 *   name GPU TEXT              product name, to the end of the line (Stand-in GPU)
 *   driver TEXT                driver version (550.00)
 *   architecture N             nvmlDeviceArchitecture_t (9, Hopper)
 *   period S                   update period of counter and power (0.02)
 *   power GPU T WATTS          from T on the power is WATTS; several lines make the profile (50 W)
 *   noise WATTS                each update's instant power is off by up to this (0.5)
 *   gain X                     the counter counts X times the true energy (1)
 *   limit WATTS                enforced power limit (400)
 *   clock MHZ                  SM clock (1500); while the clock is locked, the lock's, at most this
 *   clock_steps LOW HIGH STEP  SM clocks that can be locked (300 1980 15)
 *   clock_lock GPU MHZ         the clock is locked at the start (by somebody else)
 *   clock_log FILE             every change of a clock is added to this file, one line each
 *   temperature C              (55)
 *   throttle BITS              nvmlClocksEventReasons (0)
 *   c2c 0|1                    NVLink-C2C (Grace Hopper); without this line it is not supported
 *   mig 0|1                    current MIG mode; without this line MIG is not supported
 *   process GPU PID            a compute process of somebody
 *   counter_reset T            at T the counter starts from zero
 *   counter_stuck T            from T on the counter stands still
 *   lost GPU T                 from T on every query about the GPU gives GPU_IS_LOST
 *   mig_device GPU UUID        a MIG instance of that GPU (with "mig 1")
 *   pci GPU TEXT               PCI address (00000000:0<GPU>:00.0)
 *   fail FUNCTION CODE         the function (without the prefix nvmlDevice/nvmlSystem/nvml) returns
 *                              that nvmlReturn_t, e.g. "fail GetTotalEnergyConsumption 3",
 *                              "fail InitWithFlags 9"
 *   fail_after FUNCTION T CODE the same, from T on
 *   field_error FIELD SCOPE CODE   nvmlReturn of one field value (fields 185 and 186 exist for
 *                              scope 0, every other is NOT_SUPPORTED)
 *   field_scope FIELD SCOPE    this field exists for that scope, too
 *   field_type TYPE            nvmlValueType_t of field values (1, unsigned int)
 *
 * Functions, argument types and struct layouts are those of nvml.h (NVML 12). Counter: mJ since
 * "the driver was loaded" (an offset of 123 J). Both sensors move at multiples of the period only.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
  SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
  INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15
};
enum { MAX_INSTANCES = 4 };
enum { MAX_GPUS = 8, MAX_STEPS = 64, MAX_RULES = 32 };

typedef struct { double from_s, watts; } Step;
typedef struct {
  char uuid[96], name[96];
  Step steps[MAX_STEPS];
  int step_count;
  unsigned pids[16];
  int pid_count;
  double lost_s;
  unsigned locked_mhz, locked_memory_mhz;
  char pci[32];
  char instances[MAX_INSTANCES][96];
  int instance_count;
} Gpu;
typedef struct { char function[64]; double from_s; int code; } Failure;
typedef struct { unsigned field, scope; int code; } FieldRule;

typedef struct {
  uint32_t fieldId, scopeId;
  int64_t timestamp, latencyUsec;
  int32_t valueType, nvmlReturn;
  union { double d; uint32_t ui; uint64_t ull; int64_t sll; int32_t si; uint16_t us; } value;
} FieldValue;
typedef struct { unsigned pid; uint64_t memory; unsigned gpu_instance, compute_instance; } Process;

static struct {
  int users, gpu_count, architecture, mig, c2c, field_type, failure_count, field_rule_count;
  double start_s, period_s, noise_w, gain, limit_w, reset_s, stuck_s;
  unsigned clock_mhz, temperature_c, lowest_mhz, highest_mhz, step_mhz;
  char clock_log[256];
  uint64_t throttle;
  char driver[64];
  Gpu gpus[MAX_GPUS];
  Failure failures[MAX_RULES];
  FieldRule field_rules[MAX_RULES];
} S;

static double monotonic_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double now_s(void) { return monotonic_s() - S.start_s; }

/* ---- the file of knobs ---- */

static void each_gpu(int gpu, void (*act)(Gpu *, double, double), double a, double b) {
  for (int i = 0; i < MAX_GPUS; i++)
    if (gpu < 0 || gpu == i) act(&S.gpus[i], a, b);
}
static void add_step(Gpu *gpu, double from_s, double watts) {
  if (gpu->step_count < MAX_STEPS) gpu->steps[gpu->step_count++] = (Step){from_s, watts};
}
static void lose(Gpu *gpu, double from_s, double unused) { (void)unused; gpu->lost_s = from_s; }
static void add_pid(Gpu *gpu, double pid, double unused) {
  (void)unused;
  if (gpu->pid_count < 16) gpu->pids[gpu->pid_count++] = (unsigned)pid;
}
static void add_failure(const char *function, double from_s, int code) {
  if (S.failure_count >= MAX_RULES) return;
  Failure *failure = &S.failures[S.failure_count++];
  snprintf(failure->function, sizeof failure->function, "%s", function);
  failure->from_s = from_s;
  failure->code = code;
}

static void bad_line(const char *line) {
  fprintf(stderr, "nvml_standin: cannot understand: %s\n", line);
  exit(70);
}

static void knob(const char *line) {
  char word[64] = "", text[96] = "";
  int gpu = -1, code = 0;
  unsigned field = 0, scope = 0;
  double a = 0, b = 0;
  if (sscanf(line, "%63s", word) != 1 || word[0] == '#') return;
  const char *rest = strstr(line, word) + strlen(word);
#define KNOB(name) (strcmp(word, name) == 0)
#define NEED(count, ...) if (sscanf(rest, __VA_ARGS__) != (count)) bad_line(line)
  if (KNOB("gpus")) { NEED(1, "%d", &S.gpu_count); }
  else if (KNOB("uuid") || KNOB("name")) {
    NEED(2, "%d %95[^\n]", &gpu, text);
    if (gpu < 0 || gpu >= MAX_GPUS) bad_line(line);
    char *to = KNOB("uuid") ? S.gpus[gpu].uuid : S.gpus[gpu].name;
    snprintf(to, 96, "%s", text);
  }
  else if (KNOB("driver")) { NEED(1, "%63s", S.driver); }
  else if (KNOB("architecture")) { NEED(1, "%d", &S.architecture); }
  else if (KNOB("period")) { NEED(1, "%lf", &S.period_s); }
  else if (KNOB("power")) { NEED(3, "%d %lf %lf", &gpu, &a, &b); each_gpu(gpu, add_step, a, b); }
  else if (KNOB("noise")) { NEED(1, "%lf", &S.noise_w); }
  else if (KNOB("gain")) { NEED(1, "%lf", &S.gain); }
  else if (KNOB("limit")) { NEED(1, "%lf", &S.limit_w); }
  else if (KNOB("clock")) { NEED(1, "%u", &S.clock_mhz); }
  else if (KNOB("clock_steps")) {
    NEED(3, "%u %u %u", &S.lowest_mhz, &S.highest_mhz, &S.step_mhz);
  }
  else if (KNOB("clock_lock")) {
    NEED(2, "%d %u", &gpu, &field);
    if (gpu < 0 || gpu >= MAX_GPUS) bad_line(line);
    S.gpus[gpu].locked_mhz = field;
  }
  else if (KNOB("clock_log")) { NEED(1, "%255s", S.clock_log); }
  else if (KNOB("pci") || KNOB("mig_device")) {
    NEED(2, "%d %95s", &gpu, text);
    if (gpu < 0 || gpu >= MAX_GPUS) bad_line(line);
    if (KNOB("pci")) snprintf(S.gpus[gpu].pci, 32, "%.31s", text);
    else if (S.gpus[gpu].instance_count < MAX_INSTANCES)
      snprintf(S.gpus[gpu].instances[S.gpus[gpu].instance_count++], 96, "%s", text);
  }
  else if (KNOB("temperature")) { NEED(1, "%u", &S.temperature_c); }
  else if (KNOB("throttle")) { NEED(1, "%lf", &a); S.throttle = (uint64_t)a; }
  else if (KNOB("mig")) { NEED(1, "%d", &S.mig); }
  else if (KNOB("c2c")) { NEED(1, "%d", &S.c2c); }
  else if (KNOB("process")) { NEED(2, "%d %lf", &gpu, &a); each_gpu(gpu, add_pid, a, 0); }
  else if (KNOB("counter_reset")) { NEED(1, "%lf", &S.reset_s); }
  else if (KNOB("counter_stuck")) { NEED(1, "%lf", &S.stuck_s); }
  else if (KNOB("lost")) { NEED(2, "%d %lf", &gpu, &a); each_gpu(gpu, lose, a, 0); }
  else if (KNOB("fail")) { NEED(2, "%63s %d", text, &code); add_failure(text, -1, code); }
  else if (KNOB("fail_after")) {
    NEED(3, "%63s %lf %d", text, &a, &code);
    add_failure(text, a, code);
  }
  else if (KNOB("field_error") || KNOB("field_scope")) {
    if (KNOB("field_error")) { NEED(3, "%u %u %d", &field, &scope, &code); }
    else { NEED(2, "%u %u", &field, &scope); }
    if (S.field_rule_count < MAX_RULES)
      S.field_rules[S.field_rule_count++] = (FieldRule){field, scope, code};
  }
  else if (KNOB("field_type")) { NEED(1, "%d", &S.field_type); }
  else bad_line(line);
}

static void configure(void) {
  S.gpu_count = 1; S.architecture = 9; S.mig = S.c2c = -1; S.field_type = 1;
  S.period_s = 0.02; S.noise_w = 0.5; S.gain = 1; S.limit_w = 400;
  S.reset_s = S.stuck_s = 1e300;
  S.clock_mhz = 1500; S.temperature_c = 55;
  S.lowest_mhz = 300; S.highest_mhz = 1980; S.step_mhz = 15;
  snprintf(S.driver, sizeof S.driver, "550.00");
  for (int i = 0; i < MAX_GPUS; i++) {
    snprintf(S.gpus[i].uuid, 96, "GPU-standin-%d", i);
    snprintf(S.gpus[i].name, 96, "Stand-in GPU");
    snprintf(S.gpus[i].pci, 32, "00000000:%02X:00.0", (unsigned)i & 0xFF);
    S.gpus[i].lost_s = 1e300;
  }
  const char *path = getenv("NVML_STANDIN");
  if (!path) return;
  FILE *file = fopen(path, "r");
  if (!file) bad_line(path);
  char line[256];
  while (fgets(line, sizeof line, file)) knob(line);
  fclose(file);
}

/* ---- physics ---- */

static double power_w(const Gpu *gpu, double t) {
  double watts = 50;
  for (int i = 0; i < gpu->step_count; i++)
    if (t >= gpu->steps[i].from_s) watts = gpu->steps[i].watts;
  return watts;
}

static double energy_j(const Gpu *gpu, double t) {
  double joules = 0, at = 0, watts = power_w(gpu, 0);
  for (int i = 0; i < gpu->step_count; i++) {
    double from = gpu->steps[i].from_s;
    if (from >= t) break;
    if (from > at) { joules += watts * (from - at); at = from; }
    watts = gpu->steps[i].watts;
  }
  return joules + watts * (t - at);
}

static int64_t update_index(void) { return (int64_t)(now_s() / S.period_s); }

static double counter_j(const Gpu *gpu) {
  double t = (double)update_index() * S.period_s;
  if (t > S.stuck_s) t = S.stuck_s;
  if (t > S.reset_s) return S.gain * (energy_j(gpu, t) - energy_j(gpu, S.reset_s));
  return 123 + S.gain * energy_j(gpu, t);
}

static double shown_power_w(const Gpu *gpu) {
  int64_t index = update_index();
  uint64_t hash = (uint64_t)(index + 1) * 0x9E3779B97F4A7C15ull;
  hash ^= hash >> 32;
  double noise = ((double)(hash & 0xFFFF) / 32767.5 - 1) * S.noise_w;
  return power_w(gpu, (double)index * S.period_s) + noise;
}

static double average_power_w(const Gpu *gpu) {
  double t = (double)update_index() * S.period_s, from = t > 1 ? t - 1 : 0;
  return t > from ? (energy_j(gpu, t) - energy_j(gpu, from)) / (t - from) : power_w(gpu, 0);
}

/* ---- the library ---- */

static int failure_of(const char *function) {
  for (int i = 0; i < S.failure_count; i++)
    if (strcmp(S.failures[i].function, function) == 0 && now_s() >= S.failures[i].from_s)
      return S.failures[i].code;
  return SUCCESS;
}

static int check(const char *function) {
  if (S.users < 1) return UNINITIALIZED;
  return failure_of(function);
}

static int check_gpu(const Gpu *gpu, const char *function) {
  int code = check(function);
  if (code) return code;
  if (gpu < S.gpus || gpu >= S.gpus + S.gpu_count) return INVALID_ARGUMENT;
  return now_s() >= gpu->lost_s ? GPU_IS_LOST : SUCCESS;
}
#define CHECK(function) do { int c = check(function); if (c) return c; } while (0)
#define CHECK_GPU(function) do { int c = check_gpu(gpu, function); if (c) return c; } while (0)

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  if (S.users == 0) {
    memset(&S, 0, sizeof S);
    configure();
    S.start_s = monotonic_s();
  }
  int code = failure_of("InitWithFlags");
  if (code) return code;
  S.users++;
  return SUCCESS;
}

int nvmlShutdown(void) {
  if (S.users < 1) return UNINITIALIZED;
  S.users--;
  return SUCCESS;
}

const char *nvmlErrorString(int code) {
  (void)code;
  return "stand-in error";
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
  CHECK("GetDriverVersion");
  snprintf(version, length, "%s", S.driver);
  return SUCCESS;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
  CHECK("GetCount");
  *count = (unsigned)S.gpu_count;
  return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **gpu) {
  CHECK("GetHandleByIndex");
  if (index >= (unsigned)S.gpu_count) return INVALID_ARGUMENT;
  *gpu = &S.gpus[index];
  return now_s() >= (*gpu)->lost_s ? GPU_IS_LOST : SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **gpu) {
  CHECK("GetHandleByUUID");
  for (int i = 0; i < S.gpu_count; i++)
    if (strcmp(S.gpus[i].uuid, uuid) == 0) {
      *gpu = &S.gpus[i];
      return now_s() >= (*gpu)->lost_s ? GPU_IS_LOST : SUCCESS;
    }
  return NOT_FOUND;
}

int nvmlDeviceGetUUID(Gpu *gpu, char *uuid, unsigned length) {
  for (int i = 0; i < S.gpu_count; i++)
    for (int j = 0; j < S.gpus[i].instance_count; j++)
      if ((void *)gpu == (void *)S.gpus[i].instances[j]) {
        snprintf(uuid, length, "%s", S.gpus[i].instances[j]);
        return SUCCESS;
      }
  CHECK_GPU("GetUUID");
  snprintf(uuid, length, "%s", gpu->uuid);
  return SUCCESS;
}

int nvmlDeviceGetName(Gpu *gpu, char *name, unsigned length) {
  CHECK_GPU("GetName");
  snprintf(name, length, "%s", gpu->name);
  return SUCCESS;
}

int nvmlDeviceGetArchitecture(Gpu *gpu, unsigned *architecture) {
  CHECK_GPU("GetArchitecture");
  *architecture = (unsigned)S.architecture;
  return SUCCESS;
}

int nvmlDeviceGetMigMode(Gpu *gpu, unsigned *current, unsigned *pending) {
  CHECK_GPU("GetMigMode");
  if (S.mig < 0) return NOT_SUPPORTED;
  *current = *pending = (unsigned)S.mig;
  return SUCCESS;
}

int nvmlDeviceGetC2cModeInfoV(Gpu *gpu, unsigned *enabled) {
  CHECK_GPU("GetC2cModeInfoV");
  if (S.c2c < 0) return NOT_SUPPORTED;
  *enabled = (unsigned)S.c2c;
  return SUCCESS;
}

int nvmlDeviceGetEnforcedPowerLimit(Gpu *gpu, unsigned *milliwatts) {
  CHECK_GPU("GetEnforcedPowerLimit");
  *milliwatts = (unsigned)(S.limit_w * 1e3);
  return SUCCESS;
}

int nvmlDeviceGetTotalEnergyConsumption(Gpu *gpu, unsigned long long *millijoules) {
  CHECK_GPU("GetTotalEnergyConsumption");
  *millijoules = (unsigned long long)(counter_j(gpu) * 1e3);
  return SUCCESS;
}

int nvmlDeviceGetPowerUsage(Gpu *gpu, unsigned *milliwatts) {
  CHECK_GPU("GetPowerUsage");
  /* Instantaneous before Ampere (7), the mean of the last second since. */
  double watts = S.architecture < 7 ? shown_power_w(gpu) : average_power_w(gpu);
  *milliwatts = (unsigned)(watts * 1e3);
  return SUCCESS;
}

static int field_code(unsigned field, unsigned scope) {
  for (int i = 0; i < S.field_rule_count; i++)
    if (S.field_rules[i].field == field && S.field_rules[i].scope == scope)
      return S.field_rules[i].code;
  return (field == 185 || field == 186) && scope == 0 ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetFieldValues(Gpu *gpu, int count, FieldValue *values) {
  CHECK_GPU("GetFieldValues");
  for (int i = 0; i < count; i++) {
    FieldValue *value = &values[i];
    value->nvmlReturn = field_code(value->fieldId, value->scopeId);
    value->valueType = S.field_type;
    value->timestamp = (int64_t)(now_s() * 1e6);
    if (value->nvmlReturn != SUCCESS) continue;
    double milliwatts =
        1e3 * (value->fieldId == 186 ? shown_power_w(gpu) : average_power_w(gpu));
    switch (S.field_type) {
      case 0: value->value.d = milliwatts; break;
      case 1: value->value.ui = (uint32_t)milliwatts; break;
      case 2: case 3: value->value.ull = (uint64_t)milliwatts; break;
      case 4: value->value.sll = (int64_t)milliwatts; break;
      case 5: value->value.si = (int32_t)milliwatts; break;
      default: value->value.us = (uint16_t)milliwatts; break;
    }
  }
  return SUCCESS;
}

int nvmlDeviceGetClockInfo(Gpu *gpu, unsigned kind, unsigned *mhz) {
  CHECK_GPU("GetClockInfo");
  if (kind > 3) return INVALID_ARGUMENT;
  if (kind == 2) *mhz = gpu->locked_memory_mhz ? gpu->locked_memory_mhz : 2619;
  else *mhz = gpu->locked_mhz && gpu->locked_mhz < S.clock_mhz ? gpu->locked_mhz : S.clock_mhz;
  return SUCCESS;
}

int nvmlDeviceGetMaxClockInfo(Gpu *gpu, unsigned kind, unsigned *mhz) {
  CHECK_GPU("GetMaxClockInfo");
  if (kind > 3) return INVALID_ARGUMENT;
  *mhz = kind == 2 ? 2619 : S.highest_mhz;
  return SUCCESS;
}

/* ---- setting clocks ---- */

static void log_clock(const Gpu *gpu, const char *what, unsigned mhz) {
  FILE *file = S.clock_log[0] ? fopen(S.clock_log, "a") : NULL;
  if (!file) return;
  fprintf(file, "%s %s %u\n", gpu->uuid, what, mhz);
  fclose(file);
}

int nvmlDeviceSetGpuLockedClocks(Gpu *gpu, unsigned lowest, unsigned highest) {
  CHECK_GPU("SetGpuLockedClocks");
  if (lowest > highest || highest < S.lowest_mhz || highest > S.highest_mhz)
    return INVALID_ARGUMENT;
  gpu->locked_mhz = highest - (highest - S.lowest_mhz) % S.step_mhz;
  log_clock(gpu, "lock", gpu->locked_mhz);
  return SUCCESS;
}

int nvmlDeviceResetGpuLockedClocks(Gpu *gpu) {
  CHECK_GPU("ResetGpuLockedClocks");
  gpu->locked_mhz = 0;
  log_clock(gpu, "reset", 0);
  return SUCCESS;
}

int nvmlDeviceSetMemoryLockedClocks(Gpu *gpu, unsigned lowest, unsigned highest) {
  CHECK_GPU("SetMemoryLockedClocks");
  if (lowest > highest) return INVALID_ARGUMENT;
  gpu->locked_memory_mhz = highest;
  log_clock(gpu, "lock_memory", highest);
  return SUCCESS;
}

int nvmlDeviceResetMemoryLockedClocks(Gpu *gpu) {
  CHECK_GPU("ResetMemoryLockedClocks");
  gpu->locked_memory_mhz = 0;
  log_clock(gpu, "reset_memory", 0);
  return SUCCESS;
}

/* A list as NVML gives it: first asked for its length, then filled. */
static int give_list(unsigned *count, unsigned *values, unsigned have, unsigned top, unsigned step) {
  unsigned room = *count;
  *count = have;
  if (room < have || !values) return INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < have; i++) values[i] = top - i * step;
  return SUCCESS;
}

int nvmlDeviceGetSupportedMemoryClocks(Gpu *gpu, unsigned *count, unsigned *mhz) {
  CHECK_GPU("GetSupportedMemoryClocks");
  log_clock(gpu, "supported", 0);
  return give_list(count, mhz, 1, 2619, 0);
}

int nvmlDeviceGetSupportedGraphicsClocks(Gpu *gpu, unsigned memory, unsigned *count, unsigned *mhz) {
  CHECK_GPU("GetSupportedGraphicsClocks");
  if (memory != 2619) return NOT_FOUND;
  unsigned have = (S.highest_mhz - S.lowest_mhz) / S.step_mhz + 1;
  return give_list(count, mhz, have, S.highest_mhz, S.step_mhz);
}

/* ---- the rest ---- */

typedef struct {
  char bus_id_legacy[16];
  unsigned domain, bus, device, pci_device, pci_subsystem;
  char bus_id[32];
} PciInfo;

int nvmlDeviceGetPciInfo_v3(Gpu *gpu, PciInfo *info) {
  CHECK_GPU("GetPciInfo");
  memset(info, 0, sizeof *info);
  snprintf(info->bus_id, sizeof info->bus_id, "%s", gpu->pci);
  return SUCCESS;
}

int nvmlDeviceGetPersistenceMode(Gpu *gpu, unsigned *mode) {
  CHECK_GPU("GetPersistenceMode");
  *mode = 1;
  return SUCCESS;
}

int nvmlSystemGetNVMLVersion(char *version, unsigned length) {
  CHECK("GetNVMLVersion");
  snprintf(version, length, "12.%s", S.driver);
  return SUCCESS;
}

/* A MIG instance is only ever asked for its name: its handle is the name. */
int nvmlDeviceGetMaxMigDeviceCount(Gpu *gpu, unsigned *count) {
  CHECK_GPU("GetMaxMigDeviceCount");
  *count = S.mig < 0 ? 0 : MAX_INSTANCES;
  return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Gpu *gpu, unsigned index, void **instance) {
  CHECK_GPU("GetMigDeviceHandleByIndex");
  if (index >= (unsigned)gpu->instance_count) return NOT_FOUND;
  *instance = gpu->instances[index];
  return SUCCESS;
}

int nvmlDeviceGetTemperature(Gpu *gpu, unsigned sensor, unsigned *celsius) {
  CHECK_GPU("GetTemperature");
  if (sensor != 0) return INVALID_ARGUMENT;
  *celsius = S.temperature_c;
  return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(Gpu *gpu, unsigned long long *reasons) {
  CHECK_GPU("GetCurrentClocksEventReasons");
  *reasons = S.throttle;
  return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(Gpu *gpu, unsigned long long *reasons) {
  CHECK_GPU("GetCurrentClocksThrottleReasons");
  *reasons = S.throttle;
  return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, unsigned *count, Process *processes) {
  CHECK_GPU("GetComputeRunningProcesses");
  unsigned have = (unsigned)gpu->pid_count, room = *count;
  *count = have;
  if (have == 0) return SUCCESS;
  if (room < have || !processes) return INSUFFICIENT_SIZE;
  for (unsigned i = 0; i < have; i++) processes[i] = (Process){gpu->pids[i], 1 << 20, 0, 0};
  return SUCCESS;
}
