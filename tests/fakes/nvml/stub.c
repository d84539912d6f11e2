/* A libnvidia-ml.so.1 for tests: the real nvidia-ml-py loads it, and a text file says what machine it plays.
 *
 * FAKE_NVML_MACHINE   file of lines `key=value`; a key is `driver`, `count`, or `<gpu>.<field>`
 * FAKE_NVML_STATE  folder where setters leave what getters then return, one file a GPU: a lock lives in the
 *                  driver and outlasts the process that asked for it; `calls` there logs every setter
 *
 * Written from the public nvml.h interface. Only what ds41ctl uses; any other symbol is FunctionNotFound.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, TOO_SMALL = 7 };
enum { NO_FUNCTION = 13, LOST = 15, OTHER_VERSION = 25 };
enum { ENTRIES = 4096, TEXT = 208 };

struct entry { char key[208]; char value[208]; };
static struct entry entries[ENTRIES];
static int filled = 0;
static long calls = 0;
static long samples[64];

static void load(void) {
    const char *path = getenv("FAKE_NVML_MACHINE");
    FILE *in = path ? fopen(path, "r") : NULL;
    char line[208];
    filled = 0;
    if (!in) return;
    while (filled < ENTRIES && fgets(line, sizeof line, in)) {
        char *equals = strchr(line, '=');
        if (!equals || line[0] == '#') continue;
        *equals = 0;
        line[strcspn(line, "\n")] = 0;
        equals[1 + strcspn(equals + 1, "\n")] = 0;
        snprintf(entries[filled].key, sizeof entries[filled].key, "%s", line);
        snprintf(entries[filled].value, sizeof entries[filled].value, "%s", equals + 1);
        filled++;
    }
    fclose(in);
}

static const char *text(const char *key) {
    for (int i = 0; i < filled; i++)
        if (!strcmp(entries[i].key, key)) return entries[i].value;
    return NULL;
}

static long number(const char *key, long otherwise) {
    const char *found = text(key);
    return found ? strtol(found, NULL, 0) : otherwise;
}

static const char *of(long gpu, const char *field) {
    char key[64];
    snprintf(key, sizeof key, "%ld.%s", gpu, field);
    return text(key);
}

static long num(long gpu, const char *field, long otherwise) {
    const char *found = of(gpu, field);
    return found ? strtol(found, NULL, 0) : otherwise;
}

static int lost(long gpu) {
    calls++;
    long after = num(gpu, "lost_after", -1);
    return after >= 0 && calls > after;
}

static void *handle_of(long gpu) { return (void *)(gpu + 1); }
static long gpu_of(void *handle) { return (long)handle - 1; }

static FILE *kept(long gpu, const char *what, const char *mode) {
    char path[512];
    const char *folder = getenv("FAKE_NVML_STATE");
    if (!folder) return NULL;
    snprintf(path, sizeof path, "%s/gpu%ld.%s", folder, gpu, what);
    if (!mode) { remove(path); return NULL; }
    return fopen(path, mode);
}

static FILE *state(long gpu, const char *mode) { return kept(gpu, "lock", mode); }

static void record(const char *what, long gpu, long mhz) {
    char path[512];
    const char *folder = getenv("FAKE_NVML_STATE");
    if (!folder) return;
    snprintf(path, sizeof path, "%s/calls", folder);
    FILE *out = fopen(path, "a");
    if (!out) return;
    fprintf(out, "%s %ld %ld\n", what, gpu, mhz);
    fclose(out);
}

static int put(char *buffer, unsigned length, const char *value) {
    if (!value) return NOT_SUPPORTED;
    if (strlen(value) + 1 > length) return TOO_SMALL;
    strcpy(buffer, value);
    return OK;
}

#define GPU(handle) long gpu = gpu_of(handle); if (lost(gpu)) return LOST
#define ANSWER(field, into) do { const char *v = of(gpu, field); if (!v) return NOT_SUPPORTED; \
    *(into) = strtol(v, NULL, 0); return OK; } while (0)

int nvmlInitWithFlags(unsigned flags) { (void)flags; load(); return (int)number("init_error", OK); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) {
    static char said[32];
    snprintf(said, sizeof said, "stub error %d", code);
    return said;
}
int nvmlSystemGetDriverVersion(char *b, unsigned n) { return put(b, n, text("driver")); }
int nvmlSystemGetNVMLVersion(char *b, unsigned n) { return put(b, n, text("driver")); }
int nvmlSystemGetCudaDriverVersion(int *v) { *v = (int)number("cuda", 13000); return OK; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = (unsigned)number("count", 0); return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **h) {
    if (i >= (unsigned)number("count", 0)) return INVALID;
    if (lost(i)) return LOST;
    *h = handle_of(i);
    return OK;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **h) {
    for (long i = 0; i < number("count", 0); i++) {
        const char *mine = of(i, "uuid");
        if (!mine || strcmp(mine, uuid)) continue;
        if (lost(i)) return LOST;
        *h = handle_of(i);
        return OK;
    }
    return NOT_FOUND;
}
int nvmlDeviceGetName(void *h, char *b, unsigned n) { GPU(h); return put(b, n, of(gpu, "name")); }
int nvmlDeviceGetUUID(void *h, char *b, unsigned n) { GPU(h); return put(b, n, of(gpu, "uuid")); }

struct pci {
    char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32];
};
static int fill_pci(struct pci *p, const char *bus_id) {
    if (!bus_id) return NOT_SUPPORTED;
    memset(p, 0, sizeof *p);
    snprintf(p->bus_id, sizeof p->bus_id, "%s", bus_id);
    return OK;
}
int nvmlDeviceGetPciInfo_v3(void *h, struct pci *p) { GPU(h); return fill_pci(p, of(gpu, "bus_id")); }

struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(void *h, struct memory *m) {
    GPU(h);
    const char *total = of(gpu, "memory_mib");
    if (!total) return NOT_SUPPORTED;
    m->total = strtoull(total, NULL, 0) << 20;
    m->used = (unsigned long long)num(gpu, "memory_used_mib", 5) << 20;
    m->free = m->total - m->used;
    return OK;
}
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) {
    GPU(h);
    const char *value = of(gpu, "capability");
    return value && sscanf(value, "%d.%d", major, minor) == 2 ? OK : NOT_SUPPORTED;
}

struct process { unsigned pid; unsigned long long used; unsigned instance, compute; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *n, struct process *list) {
    GPU(h);
    const char *value = of(gpu, "processes"); /* `pid:MiB pid:MiB` */
    struct process found[16];
    unsigned many = 0;
    if (value) {
        char copy[TEXT];
        snprintf(copy, sizeof copy, "%s", value);
        for (char *word = strtok(copy, " "); word && many < 16; word = strtok(NULL, " ")) {
            unsigned pid = 0, mib = 0;
            if (sscanf(word, "%u:%u", &pid, &mib) == 2)
                found[many++] = (struct process){pid, (unsigned long long)mib << 20, 0, 0};
        }
    }
    if (!many) { *n = 0; return OK; }
    if (!list || *n < many) { *n = many; return 7; }
    memcpy(list, found, many * sizeof *list);
    *n = many;
    return OK;
}

static long sm_clock(long gpu) {
    unsigned mhz = 0;
    FILE *in = state(gpu, "r");
    if (in) {
        int got = fscanf(in, "%u", &mhz);
        fclose(in);
        if (got == 1) {
            /* a lock that is installed and not kept: every n-th sample falls to `dip_mhz` */
            long every = num(gpu, "dip_every", 0);
            if (every && ++samples[gpu] % every == 0) return num(gpu, "dip_mhz", 135);
            return mhz;
        }
    }
    return num(gpu, "sm_mhz", 135);
}
int nvmlDeviceGetClockInfo(void *h, int type, unsigned *mhz) {
    GPU(h);
    if (type == 1) { *mhz = (unsigned)sm_clock(gpu); return OK; }
    ANSWER("memory_mhz", mhz);
}
int nvmlDeviceGetMaxClockInfo(void *h, int type, unsigned *mhz) {
    GPU(h);
    if (type != 1) return NOT_SUPPORTED;
    ANSWER("sm_max_mhz", mhz);
}
int nvmlDeviceGetSupportedMemoryClocks(void *h, unsigned *n, unsigned *list) {
    GPU(h);
    const char *value = of(gpu, "memory_mhz");
    if (!value || !of(gpu, "sm_max_mhz")) return NOT_SUPPORTED;
    if (!list || *n < 1) { *n = 1; return TOO_SMALL; }
    list[0] = (unsigned)strtoul(value, NULL, 0);
    *n = 1;
    return OK;
}
int nvmlDeviceGetSupportedGraphicsClocks(void *h, unsigned memory, unsigned *n, unsigned *list) {
    (void)memory;
    GPU(h);
    const char *max = of(gpu, "sm_max_mhz");
    if (!max) return NOT_SUPPORTED;
    unsigned top = (unsigned)strtoul(max, NULL, 0), low = 135, step = 15, many = (top - low) / step + 1;
    if (!list || *n < many) { *n = many; return TOO_SMALL; }
    for (unsigned i = 0; i < many; i++) list[i] = top - i * step;
    *n = many;
    return OK;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *h, unsigned long long *bits) { GPU(h); ANSWER("throttle", bits); }
/* what a setter has left, else the machine's own `field` */
static int value(long gpu, const char *what, const char *field, long *into) {
    FILE *in = kept(gpu, what, "r");
    if (in) {
        int got = fscanf(in, "%ld", into);
        fclose(in);
        if (got == 1) return OK;
    }
    ANSWER(field, into);
}
static int leave(long gpu, const char *what, long number_) {
    FILE *out = kept(gpu, what, "w");
    if (!out) return NO_PERMISSION;
    fprintf(out, "%ld\n", number_);
    fclose(out);
    return OK;
}
int nvmlDeviceGetPowerManagementLimit(void *h, unsigned *mw) {
    GPU(h);
    long found;
    int code = value(gpu, "power", "power_mw", &found);
    if (code == OK) *mw = (unsigned)found;
    return code;
}
int nvmlDeviceGetPowerManagementLimitConstraints(void *h, unsigned *low, unsigned *high) {
    GPU(h);
    if (!of(gpu, "power_min_mw") || !of(gpu, "power_max_mw")) return NOT_SUPPORTED;
    *low = (unsigned)num(gpu, "power_min_mw", 0);
    *high = (unsigned)num(gpu, "power_max_mw", 0);
    return OK;
}
int nvmlDeviceSetPowerManagementLimit(void *h, unsigned mw) {
    GPU(h);
    record("power", gpu, mw);
    int code = (int)num(gpu, "power_error", number("power_error", OK));
    if (code) return code;
    long low = num(gpu, "power_min_mw", 0), high = num(gpu, "power_max_mw", 1L << 30);
    if ((long)mw < low || (long)mw > high) return INVALID;
    return leave(gpu, "power", num(gpu, "power_lies", mw)); /* a driver that answers success and sets another one */
}

/* `<gpu>.offset` is the clock offset now; a card without it has none. `offsets_by_state=0`: a driver before 555 */
struct offset { unsigned version, type, state; int mhz, low, high; };
static int offset_now(long gpu, int *low, int *high, int *mhz) {
    long found;
    int code = value(gpu, "offset", "offset", &found);
    if (code) return code;
    if (mhz) *mhz = (int)found;
    *low = (int)num(gpu, "offset_min", -500);
    *high = (int)num(gpu, "offset_max", 500);
    return OK;
}
static int shift(long gpu, long mhz) {
    int low, high;
    record("offset", gpu, mhz);
    int code = (int)num(gpu, "offset_error", number("offset_error", offset_now(gpu, &low, &high, NULL)));
    if (code) return code;
    if (mhz < low || mhz > high) return INVALID;
    return leave(gpu, "offset", num(gpu, "offset_lies", mhz));
}
static int by_state(const struct offset *o) {
    if (!number("offsets_by_state", 1)) return NO_FUNCTION;
    if (o->version != (sizeof *o | 1u << 24)) return OTHER_VERSION;
    return o->type || o->state ? INVALID : OK;
}
int nvmlDeviceGetClockOffsets(void *h, struct offset *o) {
    GPU(h);
    int code = by_state(o);
    return code ? code : offset_now(gpu, &o->low, &o->high, &o->mhz);
}
int nvmlDeviceSetClockOffsets(void *h, struct offset *o) {
    GPU(h);
    int code = by_state(o);
    return code ? code : shift(gpu, o->mhz);
}
int nvmlDeviceGetGpcClkVfOffset(void *h, int *mhz) {
    int low, high;
    GPU(h);
    return number("old_offsets", 1) ? offset_now(gpu, &low, &high, mhz) : NO_FUNCTION;
}
int nvmlDeviceGetGpcClkMinMaxVfOffset(void *h, int *low, int *high) {
    GPU(h);
    return number("old_offsets", 1) ? offset_now(gpu, low, high, NULL) : NO_FUNCTION;
}
int nvmlDeviceSetGpcClkVfOffset(void *h, int mhz) {
    GPU(h);
    return number("old_offsets", 1) ? shift(gpu, mhz) : NO_FUNCTION;
}
int nvmlDeviceGetPowerManagementDefaultLimit(void *h, unsigned *mw) { GPU(h); ANSWER("power_default_mw", mw); }
int nvmlDeviceGetTemperature(void *h, int sensor, unsigned *c) { (void)sensor; GPU(h); ANSWER("temperature", c); }
int nvmlDeviceGetPersistenceMode(void *h, int *mode) { GPU(h); ANSWER("persistence", mode); }
int nvmlDeviceGetEccMode(void *h, int *now, int *pending) {
    GPU(h);
    *pending = (int)num(gpu, "ecc", 0);
    ANSWER("ecc", now);
}
int nvmlDeviceGetTotalEccErrors(void *h, int type, int counter, unsigned long long *count) {
    (void)type; (void)counter;
    GPU(h);
    ANSWER("ecc_errors", count);
}
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *pending) {
    GPU(h);
    *pending = (unsigned)num(gpu, "mig", 0);
    ANSWER("mig", now);
}
int nvmlDeviceGetComputeMode(void *h, int *mode) { GPU(h); ANSWER("compute_mode", mode); }
int nvmlDeviceGetDisplayActive(void *h, int *on) { GPU(h); ANSWER("display", on); }
int nvmlDeviceGetCurrPcieLinkGeneration(void *h, unsigned *g) { GPU(h); ANSWER("pcie_gen", g); }
int nvmlDeviceGetMaxPcieLinkGeneration(void *h, unsigned *g) { GPU(h); ANSWER("pcie_gen_max", g); }
int nvmlDeviceGetCurrPcieLinkWidth(void *h, unsigned *w) { GPU(h); ANSWER("pcie_width", w); }
int nvmlDeviceGetMaxPcieLinkWidth(void *h, unsigned *w) { GPU(h); ANSWER("pcie_width_max", w); }
int nvmlDeviceGetNumaNodeId(void *h, unsigned *node) { GPU(h); ANSWER("numa", node); }

struct utilization { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(void *h, struct utilization *u) {
    GPU(h);
    u->gpu = (unsigned)num(gpu, "busy", 0);
    u->memory = u->gpu / 2;
    return OK;
}

/* `<gpu>.link<n>` is `up gpu <bus id>`, `up switch <bus id>` or `down` */
static int link_parts(long gpu, unsigned link, char *state, char *kind, char *bus_id) {
    char key[32];
    snprintf(key, sizeof key, "link%u", link);
    const char *value = of(gpu, key);
    if (!value) return link == 0 ? NOT_SUPPORTED : INVALID;
    kind[0] = bus_id[0] = 0;
    return sscanf(value, "%7s %15s %31s", state, kind, bus_id) >= 1 ? OK : INVALID;
}
int nvmlDeviceGetNvLinkState(void *h, unsigned link, unsigned *up) {
    char state[8], kind[16], bus_id[32];
    GPU(h);
    int code = link_parts(gpu, link, state, kind, bus_id);
    if (code == OK) *up = !strcmp(state, "up");
    return code;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, unsigned link, struct pci *p) {
    char state[8], kind[16], bus_id[32];
    GPU(h);
    int code = link_parts(gpu, link, state, kind, bus_id);
    return code == OK ? fill_pci(p, bus_id) : code;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void *h, unsigned link, unsigned *type) {
    char state[8], kind[16], bus_id[32];
    GPU(h);
    int code = link_parts(gpu, link, state, kind, bus_id);
    if (code == OK) *type = !strcmp(kind, "gpu") ? 0 : !strcmp(kind, "switch") ? 2 : 0xFF;
    return code;
}
/* `p2p<capability>.<a>-<b>`, else `p2p<capability>`, else not supported (5) */
int nvmlDeviceGetP2PStatus(void *a, void *b, int capability, int *status) {
    char key[48];
    long first = gpu_of(a), second = gpu_of(b);
    if (lost(first) || lost(second)) return LOST;
    snprintf(key, sizeof key, "p2p%d", capability);
    long otherwise = number(key, 5);
    snprintf(key, sizeof key, "p2p%d.%ld-%ld", capability, first, second);
    *status = (int)number(key, otherwise);
    return OK;
}

int nvmlDeviceSetGpuLockedClocks(void *h, unsigned low, unsigned high) {
    GPU(h);
    record("lock", gpu, high);
    int code = (int)num(gpu, "lock_error", number("lock_error", OK));
    if (code) return code;
    if (low > high) return INVALID;
    FILE *out = state(gpu, "w");
    if (!out) return NO_PERMISSION;
    fprintf(out, "%u\n", high);
    fclose(out);
    return OK;
}
int nvmlDeviceResetGpuLockedClocks(void *h) {
    GPU(h);
    record("reset", gpu, 0);
    int code = (int)num(gpu, "reset_error", number("reset_error", OK));
    if (code) return code;
    state(gpu, NULL);
    return OK;
}
