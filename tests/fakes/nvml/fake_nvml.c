/* A stand-in for libnvidia-ml.so.1, steered by the text file named in KVWATCH_FAKE_NVML.
 *
 * The file is looked at again at most every 5 ms, so a test changes the "hardware" of a running
 * worker by replacing it. Grammar: one statement a line, see Scenario in __init__.py.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#define MAX_GPUS 32
#define MAX_MIG 7
#define MAX_PROCS 64
#define MAX_FAULTS 64
#define MAX_XIDS 256
#define MAGIC 0x4b565741u

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, TOO_SMALL = 7, TIMED_OUT = 10,
       LOST = 15 };

typedef unsigned long long u64;
typedef unsigned int u32;

typedef struct { u32 pid; u64 used; char kind; } process_t;
typedef struct { double t; uint64_t used, free, reserved; } record_t;

typedef struct device {
    u32 magic;
    int index;        /* of the GPU */
    int slot;         /* MIG slot, -1 for the GPU itself */
    int present;
    char uuid[96], name[96];
    u64 total, used, free, reserved, energy, ecc_corrected, ecc_uncorrected, reasons, bar1_total, bar1_used;
    u32 util, memutil, power, temp, remap_pending, remap_failed, mig, gi, ci, numa;  /* numa: node + 1 */
    process_t procs[MAX_PROCS];
    int proc_count;
    char playback[512];
    double phase;
    struct device *mig_devices;
} device_t;

typedef struct { char kind; int gpu; char call[64]; long value; } fault_t;
typedef struct { long seq; int gpu; u64 code; } xid_t;

static device_t gpus[MAX_GPUS];
static device_t migs[MAX_GPUS][MAX_MIG];
static fault_t faults[MAX_FAULTS];
static xid_t xids[MAX_XIDS];
static int gpu_count, fault_count, xid_count, initialised, ever_read;
static long delivered_seq;
static int registered[MAX_GPUS];
static char driver[80] = "580.159.04";
static char call_log[512];
static int log_fd = -1;
static struct { record_t *rows; size_t n; double began; char path[512]; } tapes[MAX_GPUS];

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void pause_us(long us) {
    struct timespec t = {us / 1000000, (us % 1000000) * 1000};
    while (nanosleep(&t, &t) != 0) {}
}

static void defaults(int i) {
    device_t *g = &gpus[i];
    memset(g, 0, sizeof *g);
    g->magic = MAGIC; g->index = i; g->slot = -1; g->present = 1;
    snprintf(g->uuid, sizeof g->uuid, "GPU-%08x-0000-4000-8000-%012x", 0xf0000000u + (u32)i, (u32)i);
    strcpy(g->name, "NVIDIA H200");
    g->total = 150754820096ull; g->reserved = 644939776ull; g->free = g->total - g->reserved;
    g->power = 85986; g->temp = 37; g->energy = 2853365; g->reasons = 1;
    g->bar1_total = 274877906944ull; g->bar1_used = 1703936;
    g->mig_devices = migs[i];
    for (int s = 0; s < MAX_MIG; s++) {
        device_t *m = &migs[i][s];
        memset(m, 0, sizeof *m);
        m->magic = MAGIC; m->index = i; m->slot = s;
    }
}

static void set_field(device_t *g, const char *field, const char *value) {
    u64 n = strtoull(value, NULL, 0);
    if (!strcmp(field, "uuid")) snprintf(g->uuid, sizeof g->uuid, "%s", value);
    else if (!strcmp(field, "name")) snprintf(g->name, sizeof g->name, "%s", value);
    else if (!strcmp(field, "total")) g->total = n;
    else if (!strcmp(field, "used")) g->used = n;
    else if (!strcmp(field, "free")) g->free = n;
    else if (!strcmp(field, "reserved")) g->reserved = n;
    else if (!strcmp(field, "util")) g->util = (u32)n;
    else if (!strcmp(field, "memutil")) g->memutil = (u32)n;
    else if (!strcmp(field, "power")) g->power = (u32)n;
    else if (!strcmp(field, "temp")) g->temp = (u32)n;
    else if (!strcmp(field, "energy")) g->energy = n;
    else if (!strcmp(field, "ecc_corrected")) g->ecc_corrected = n;
    else if (!strcmp(field, "ecc_uncorrected")) g->ecc_uncorrected = n;
    else if (!strcmp(field, "reasons")) g->reasons = n;
    else if (!strcmp(field, "bar1_total")) g->bar1_total = n;
    else if (!strcmp(field, "bar1_used")) g->bar1_used = n;
    else if (!strcmp(field, "remap_pending")) g->remap_pending = (u32)n;
    else if (!strcmp(field, "remap_failed")) g->remap_failed = (u32)n;
    else if (!strcmp(field, "mig")) g->mig = (u32)n;
    else if (!strcmp(field, "numa")) g->numa = (u32)n + 1;
    else { fprintf(stderr, "fake nvml: unknown field %s\n", field); abort(); }
}

static void add_process(device_t *g, const char *kind, u32 pid, u64 used) {
    if (g->proc_count >= MAX_PROCS) return;
    g->procs[g->proc_count].pid = pid;
    g->procs[g->proc_count].used = used;
    g->procs[g->proc_count++].kind = kind[0];
}

/* "*" is any, "3" a GPU, "3:1" the MIG instance in slot 1 of GPU 3. */
static int gpu_number(const char *word) {
    const char *slot = strchr(word, ':');
    if (word[0] == '*') return -1;
    return atoi(word) + (slot ? 1000 * (atoi(slot + 1) + 1) : 0);
}

static void read_line(char *line) {
    char a[512], b[512], c[512], d[512];
    u64 t, u, f, r; u32 gi, ci; int n;
    if (sscanf(line, "count %d", &n) == 1) gpu_count = n;
    else if (sscanf(line, "driver %79s", driver) == 1) {}
    else if (sscanf(line, "calllog %511s", call_log) == 1) {}
    else if (sscanf(line, "gpu %511s %511s %511[^\n]", a, b, c) == 3) {
        for (int i = 0; i < MAX_GPUS; i++)
            if (gpu_number(a) == -1 || gpu_number(a) == i) set_field(&gpus[i], b, c);
    } else if (sscanf(line, "proc %511s %511s %511s %511s", a, b, c, d) == 4) {
        for (int i = 0; i < MAX_GPUS; i++)
            if (gpu_number(a) == -1 || gpu_number(a) == i)
                add_process(&gpus[i], b, (u32)strtoul(c, NULL, 0), strtoull(d, NULL, 0));
    } else if (sscanf(line, "mig %d %511s %511s %llu %llu %llu %llu %u %u", &n, a, b, &t, &u, &f, &r, &gi, &ci) == 9) {
        device_t *m = &migs[n][atoi(a)];
        m->present = 1; m->total = t; m->used = u; m->free = f; m->reserved = r; m->gi = gi; m->ci = ci;
        m->bar1_total = 1 << 30;
        snprintf(m->uuid, sizeof m->uuid, "%s", b);
    } else if (sscanf(line, "migproc %d %511s %511s %511s", &n, a, b, c) == 4)
        add_process(&migs[n][atoi(a)], "c", (u32)strtoul(b, NULL, 0), strtoull(c, NULL, 0));
    else if (sscanf(line, "fault %511s %511s %63s %511s", a, b, c, d) == 4 && fault_count < MAX_FAULTS) {
        fault_t *x = &faults[fault_count++];
        x->kind = a[0]; x->gpu = gpu_number(b); x->value = atol(d);
        snprintf(x->call, sizeof x->call, "%.63s", c);
    } else if (sscanf(line, "xid %511s %511s %511s", a, b, c) == 3 && xid_count < MAX_XIDS) {
        xids[xid_count].seq = atol(a); xids[xid_count].gpu = atoi(b);
        xids[xid_count++].code = strtoull(c, NULL, 0);
    } else if (sscanf(line, "playback %d %511s %511s", &n, a, b) == 3) {
        snprintf(gpus[n].playback, sizeof gpus[n].playback, "%s", a);
        gpus[n].phase = atof(b);
    } else if (line[0] != '\n' && line[0] != '#') { fprintf(stderr, "fake nvml: %s", line); abort(); }
}

static void read_scenario(const char *path) {
    FILE *f = fopen(path, "r");
    char line[2048];
    if (!f) return;
    gpu_count = 1; fault_count = 0; xid_count = 0; call_log[0] = 0;
    for (int i = 0; i < MAX_GPUS; i++) defaults(i);
    while (fgets(line, sizeof line, f)) read_line(line);
    fclose(f);
    if (!ever_read)
        for (int i = 0; i < xid_count; i++)
            if (xids[i].seq > delivered_seq) delivered_seq = xids[i].seq;
    ever_read = 1;
    if (call_log[0] && log_fd < 0) log_fd = open(call_log, O_CREAT | O_WRONLY | O_APPEND | O_CLOEXEC, 0644);
}

static void refresh(void) {
    static struct timespec mtime;
    static ino_t inode;
    static double looked;
    const char *path = getenv("KVWATCH_FAKE_NVML");
    struct stat s;
    double now = now_s();
    if (ever_read && now - looked < 0.005) return;
    looked = now;
    if (!path) { if (!ever_read) { gpu_count = 1; defaults(0); ever_read = 1; } return; }
    if (stat(path, &s)) return;
    if (ever_read && s.st_ino == inode && s.st_mtim.tv_sec == mtime.tv_sec && s.st_mtim.tv_nsec == mtime.tv_nsec) return;
    inode = s.st_ino; mtime = s.st_mtim;
    read_scenario(path);
}

static fault_t *fault(char kind, int gpu, const char *call) {
    for (int i = 0; i < fault_count; i++) {
        fault_t *x = &faults[i];
        if (x->kind == kind && (x->gpu == -1 || x->gpu == gpu) && (x->call[0] == '*' || !strcmp(x->call, call))) return x;
    }
    return NULL;
}

static int enter_gpu(const char *call, int gpu) {
    fault_t *x;
    refresh();
    if (log_fd >= 0) {
        char line[160];
        int n = snprintf(line, sizeof line, "%.4f %s %d\n", now_s(), call, gpu);
        if (write(log_fd, line, (size_t)n) < 0) {}
    }
    if (!fault_count) return OK;
    while (fault('h', gpu, call)) { pause_us(5000); refresh(); }
    if (fault('c', gpu, call)) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
    }
    if ((x = fault('s', gpu, call))) pause_us(x->value);
    if ((x = fault('e', gpu, call))) return (int)x->value;
    return OK;
}

/* A NULL handle is dereferenced, as the real library does. */
static int enter(const char *call, device_t *d) {
    int rc;
    if (!initialised) return UNINITIALIZED;
    if (d->magic != MAGIC) return INVALID;
    if ((rc = enter_gpu(call, d->index + 1000 * (d->slot + 1)))) return rc;
    if (d->index >= gpu_count) return LOST;
    if (d->slot >= 0 && !d->present) return INVALID;
    return OK;
}

#define DEVICE(d) do { int rc_ = enter(__func__, d); if (rc_) return rc_; } while (0)
#define SYSTEM() do { int rc_ = enter_gpu(__func__, -2); if (rc_) return rc_; } while (0)
#define WHOLE_GPU(d) do { if ((d)->slot >= 0) return NOT_SUPPORTED; } while (0)
#define GETTER(function, type, field) int function(device_t *d, type *out) { DEVICE(d); WHOLE_GPU(d); *out = d->field; return OK; }

/* A line for each process that loads the library, where KVWATCH_FAKE_NVML_STARTS names a file. */
static void note_start(void) {
    const char *path = getenv("KVWATCH_FAKE_NVML_STARTS");
    FILE *f = path ? fopen(path, "a") : NULL;
    if (f) { fprintf(f, "%.4f %d\n", now_s(), (int)getpid()); fclose(f); }
}

int nvmlInitWithFlags(u32 flags) { (void)flags; note_start(); SYSTEM(); initialised++; return OK; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { SYSTEM(); if (!initialised) return UNINITIALIZED; initialised--; return OK; }
const char *nvmlErrorString(int code) { (void)code; return "fake error"; }

static int text(const char *from, char *to, u32 n) {
    if (strlen(from) + 1 > n) return TOO_SMALL;
    strcpy(to, from);
    return OK;
}
int nvmlSystemGetDriverVersion(char *out, u32 n) { SYSTEM(); return text(driver, out, n); }
int nvmlSystemGetNVMLVersion(char *out, u32 n) { SYSTEM(); return text("13.580.159.04", out, n); }
int nvmlDeviceGetCount_v2(u32 *out) { SYSTEM(); *out = (u32)gpu_count; return OK; }
int nvmlDeviceGetHandleByIndex_v2(u32 i, device_t **out) {
    int rc = enter_gpu(__func__, (int)i);
    if (rc) return rc;
    if ((int)i >= gpu_count) return INVALID;
    *out = &gpus[i];
    return OK;
}
int nvmlDeviceGetUUID(device_t *d, char *out, u32 n) { DEVICE(d); return text(d->uuid, out, n); }
int nvmlDeviceGetName(device_t *d, char *out, u32 n) { DEVICE(d); return text(d->slot < 0 ? d->name : "MIG device", out, n); }
int nvmlDeviceGetIndex(device_t *d, u32 *out) { DEVICE(d); *out = (u32)d->index; return OK; }

static void load_tape(device_t *d) {
    struct stat s;
    char mark[600];
    int i = d->index, fd = open(d->playback, O_RDONLY | O_CLOEXEC);
    FILE *f;
    if (fd < 0 || fstat(fd, &s)) abort();
    tapes[i].rows = mmap(NULL, (size_t)s.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    tapes[i].n = (size_t)s.st_size / sizeof(record_t);
    tapes[i].began = now_s();
    snprintf(tapes[i].path, sizeof tapes[i].path, "%s", d->playback);
    snprintf(mark, sizeof mark, "%s.started", d->playback);
    if ((f = fopen(mark, "w"))) { fprintf(f, "%.6f\n", tapes[i].began); fclose(f); }
}

static void play(device_t *d) {
    int i = d->index;
    if (!d->playback[0] || d->slot >= 0) return;
    if (strcmp(tapes[i].path, d->playback)) load_tape(d);
    double t = d->phase + now_s() - tapes[i].began;
    size_t low = 0, high = tapes[i].n;
    while (high - low > 1) {
        size_t middle = (low + high) / 2;
        if (tapes[i].rows[middle].t <= t) low = middle; else high = middle;
    }
    d->used = tapes[i].rows[low].used; d->free = tapes[i].rows[low].free; d->reserved = tapes[i].rows[low].reserved;
}

typedef struct { u64 total, free, used; } memory_v1_t;
typedef struct { u32 version; u64 total, reserved, free, used; } memory_v2_t;

int nvmlDeviceGetMemoryInfo(device_t *d, memory_v1_t *out) {
    DEVICE(d); play(d);
    out->total = d->total; out->free = d->free; out->used = d->used + d->reserved;
    return OK;
}
int nvmlDeviceGetMemoryInfo_v2(device_t *d, memory_v2_t *out) {
    DEVICE(d); play(d);
    if (out->version != 0x02000028) return 25;
    out->total = d->total; out->free = d->free; out->used = d->used; out->reserved = d->reserved;
    return OK;
}
int nvmlDeviceGetBAR1MemoryInfo(device_t *d, u64 *out) {
    DEVICE(d);
    out[0] = d->bar1_total; out[1] = d->bar1_total - d->bar1_used; out[2] = d->bar1_used;
    return OK;
}
int nvmlDeviceGetUtilizationRates(device_t *d, u32 *out) {
    DEVICE(d); WHOLE_GPU(d);
    if (d->mig) return NOT_SUPPORTED;
    out[0] = d->util; out[1] = d->memutil;
    return OK;
}
GETTER(nvmlDeviceGetPowerUsage, u32, power)
GETTER(nvmlDeviceGetTotalEnergyConsumption, u64, energy)
GETTER(nvmlDeviceGetCurrentClocksEventReasons, u64, reasons)
int nvmlDeviceGetTemperature(device_t *d, u32 sensor, u32 *out) { (void)sensor; DEVICE(d); WHOLE_GPU(d); *out = d->temp; return OK; }
int nvmlDeviceGetTotalEccErrors(device_t *d, u32 type, u32 counter, u64 *out) {
    DEVICE(d); WHOLE_GPU(d);
    (void)counter;
    *out = type ? d->ecc_uncorrected : d->ecc_corrected;
    return OK;
}
int nvmlDeviceGetRemappedRows(device_t *d, u32 *corrected, u32 *uncorrected, u32 *pending, u32 *failed) {
    DEVICE(d); WHOLE_GPU(d);
    if (d->mig) return NOT_SUPPORTED;
    *corrected = *uncorrected = 0; *pending = d->remap_pending; *failed = d->remap_failed;
    return OK;
}
int nvmlDeviceGetNumaNodeId(device_t *d, u32 *out) {
    DEVICE(d);
    if (!d->numa) return NOT_SUPPORTED;
    *out = d->numa - 1;
    return OK;
}
int nvmlDeviceGetPcieThroughput(device_t *d, u32 counter, u32 *out) { (void)counter; DEVICE(d); pause_us(20000); *out = 0; return OK; }

#ifdef LAYOUT_535
typedef struct { u32 pid; u64 used; u32 gi, ci; u64 cc_protected; } process_info_t;
#else
typedef struct { u32 pid; u64 used; u32 gi, ci; } process_info_t;
int nvmlDeviceGetRunningProcessDetailList(device_t *d, void *list) { (void)list; DEVICE(d); return NOT_SUPPORTED; }
#endif
int nvmlDeviceGetConfComputeMemSizeInfo(device_t *d, void *out) { (void)out; DEVICE(d); return NOT_SUPPORTED; }

static int processes(device_t *d, char kind, u32 *count, process_info_t *out) {
    u32 n = 0, room = *count;
    for (int i = 0; i < d->proc_count; i++) n += d->procs[i].kind == kind;
    *count = n;
    if (n > room) return TOO_SMALL;
    n = 0;
    for (int i = 0; i < d->proc_count; i++) {
        if (d->procs[i].kind != kind) continue;
        memset(&out[n], 0, sizeof out[n]);
        out[n].pid = d->procs[i].pid; out[n].used = d->procs[i].used;
        out[n].gi = d->slot < 0 ? 0xffffffffu : d->gi; out[n++].ci = d->slot < 0 ? 0xffffffffu : d->ci;
    }
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(device_t *d, u32 *n, process_info_t *out) { DEVICE(d); return processes(d, 'c', n, out); }
int nvmlDeviceGetGraphicsRunningProcesses_v3(device_t *d, u32 *n, process_info_t *out) { DEVICE(d); return processes(d, 'g', n, out); }
int nvmlDeviceGetMPSComputeRunningProcesses_v3(device_t *d, u32 *n, process_info_t *out) { DEVICE(d); return processes(d, 'm', n, out); }

int nvmlDeviceGetMigMode(device_t *d, u32 *current, u32 *pending) { DEVICE(d); *current = *pending = d->mig; return OK; }
int nvmlDeviceGetMaxMigDeviceCount(device_t *d, u32 *out) { DEVICE(d); *out = MAX_MIG; return OK; }
int nvmlDeviceGetMigDeviceHandleByIndex(device_t *d, u32 i, device_t **out) {
    DEVICE(d);
    if (i >= MAX_MIG || !d->mig_devices[i].present) return NOT_FOUND;
    *out = &d->mig_devices[i];
    return OK;
}
int nvmlDeviceGetGpuInstanceId(device_t *d, u32 *out) { DEVICE(d); *out = d->gi; return d->slot < 0 ? INVALID : OK; }
int nvmlDeviceGetComputeInstanceId(device_t *d, u32 *out) { DEVICE(d); *out = d->ci; return d->slot < 0 ? INVALID : OK; }
typedef struct { u32 sms, copies, decoders, encoders, jpegs, ofas, gi_slices, ci_slices; u64 memory_mb; } attributes_t;
int nvmlDeviceGetAttributes_v2(device_t *d, attributes_t *out) {
    DEVICE(d);
    if (d->slot < 0) return NOT_SUPPORTED;
    memset(out, 0, sizeof *out);
    out->gi_slices = out->ci_slices = 1; out->memory_mb = d->total >> 20;
    return OK;
}

typedef struct { device_t *device; u64 type, data; u32 gi, ci; } event_t;
static int the_set;
int nvmlEventSetCreate(void **out) { SYSTEM(); *out = &the_set; return OK; }
/* What waits in a set is lost with it. */
int nvmlEventSetFree(void *set) {
    (void)set; SYSTEM();
    memset(registered, 0, sizeof registered);
    for (int i = 0; i < xid_count; i++) if (xids[i].seq > delivered_seq) delivered_seq = xids[i].seq;
    return OK;
}
int nvmlDeviceGetSupportedEventTypes(device_t *d, u64 *out) { DEVICE(d); *out = 65439; return OK; }
int nvmlDeviceRegisterEvents(device_t *d, u64 types, void *set) {
    (void)set; DEVICE(d);
    if (types & ~65439ull) return INVALID;
    registered[d->index] = 1;
    return OK;
}
int nvmlEventSetWait_v2(void *set, event_t *out, u32 timeout_ms) {
    (void)set; SYSTEM();
    if (timeout_ms) pause_us(1000L * timeout_ms);
    for (int i = 0; i < xid_count; i++) {
        if (xids[i].seq <= delivered_seq) continue;
        delivered_seq = xids[i].seq;
        if (!registered[xids[i].gpu]) continue;
        memset(out, 0, sizeof *out);
        out->device = &gpus[xids[i].gpu]; out->type = 8; out->data = xids[i].code;
        out->gi = out->ci = 0xffffffffu;
        return OK;
    }
    return TIMED_OUT;
}
