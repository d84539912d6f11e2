// Engram rows: gathered from mapped tables, read from disk, placed by the builder, compared by the verifier.
//
// C++17, C ABI, no CUDA, Linux. Compiled for the portable baseline of the platform; on x86-64 the gather loops exist
// three times and the widest that the processor runs is chosen when the library is loaded.
//
// A record is one table row: 256 bytes of F8_E4M3 weights and 8 bytes of UE8M0 scales, 264 bytes in all.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "loops.h"
#include "pool.h"

using ds41::kRecord;
using ds41::Pool;
using ds41::Worker;

namespace {

constexpr int kAbi = 2;
// Every cache line is asked for twice: kFar records ahead into the second-level cache, which has more outstanding misses
// than the first, and kNear ahead from there into the first, past the caches behind it. Measured on 2 MiB pages against
// one prefetch into any level at 4 to 128 records, against whole sub-tables one after the other, and against streaming
// stores: within 5 % of the best of all on a Xeon (family 6, model 207; 4.3 and 94.4 GiB, 1, 2 and 4 threads), and near
// the best on a busy EPYC, where each single prefetch loses 10 % or more on one of the two.
constexpr int64_t kFar = 64;
constexpr int64_t kNear = 8;
// Up to here the caller gathers alone: waking a thread costs more than copying this many rows.
constexpr int64_t kAlone = 1024;

// kLocality 2 is prefetcht1 on x86-64, into the second-level cache; 0 is prefetchnta, into the first alone.
template <int kLocality>
inline void prefetch_record(const uint8_t* record) {
  for (int64_t at = 0; at < kRecord; at += 64) __builtin_prefetch(record + at, 0, kLocality);
}

}  // namespace

extern "C" {

// One mapped piece of a table: rows [first_row, first_row + rows) start at base. `group` names the workers that read it
// (one group a NUMA node).
struct Ds41Part {
  const uint8_t* base;
  int64_t first_row;
  int64_t rows;
  int32_t group;
  int32_t reserved;
};

struct Ds41Counters {
  uint64_t calls;
  uint64_t rows;
  uint64_t bytes;
  uint64_t nanoseconds;
};

}  // extern "C"

namespace {

struct Job {
  const Ds41Part* parts;
  int64_t n_parts;
  const int64_t* ids;
  int64_t total;
  uint8_t* out;
  bool by_group;  // workers of several groups: each reads only its own parts
};

inline const Ds41Part* part_of(const Job& job, int64_t row) {
  for (const Ds41Part* part = job.parts; part != job.parts + job.n_parts; ++part)
    if (static_cast<uint64_t>(row) - static_cast<uint64_t>(part->first_row) < static_cast<uint64_t>(part->rows))
      return part;
  return nullptr;
}

namespace portable {
inline void copy_record(uint8_t* to, const uint8_t* from) {
  for (int64_t at = 0; at < 256; at += 16) std::memcpy(to + at, from + at, 16);
  std::memcpy(to + 256, from + 256, 8);
}
#include "gather_loop.inc"
}  // namespace portable

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DS41_DISPATCH 1

#pragma GCC push_options
#pragma GCC target("avx2")
namespace avx2 {
inline void copy_record(uint8_t* to, const uint8_t* from) {
  for (int64_t at = 0; at < 256; at += 32)
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(to + at), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at)));
  std::memcpy(to + 256, from + 256, 8);
}
#include "gather_loop.inc"
}  // namespace avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f")
namespace avx512 {
inline void copy_record(uint8_t* to, const uint8_t* from) {
  for (int64_t at = 0; at < 256; at += 64) _mm512_storeu_si512(to + at, _mm512_loadu_si512(from + at));
  std::memcpy(to + 256, from + 256, 8);
}
#include "gather_loop.inc"
}  // namespace avx512
#pragma GCC pop_options
#endif

struct Loops {
  const char* name;
  void (*parts)(const Job&, int64_t, int64_t, int);
  void (*one_part)(const Job&, int64_t, int64_t);
};

constexpr Loops kLoops[] = {
    {"portable", portable::gather_parts, portable::gather_one_part},
#ifdef DS41_DISPATCH
    {"avx2", avx2::gather_parts, avx2::gather_one_part},
    {"avx512", avx512::gather_parts, avx512::gather_one_part},
#endif
};

// The widest loops this processor runs.
int best_loops() {
#ifdef DS41_DISPATCH
  if (__builtin_cpu_supports("avx512f")) return 2;
  if (__builtin_cpu_supports("avx2")) return 1;
#endif
  return 0;
}

std::atomic<int> chosen_loops{best_loops()};

// One worker's share of a job.
void share(const Worker& worker, const void* argument) {
  const Job& job = *static_cast<const Job*>(argument);
  const int64_t begin = job.total * worker.rank / worker.peers;
  const int64_t end = job.total * (worker.rank + 1) / worker.peers;
  const Loops& loops = kLoops[chosen_loops.load(std::memory_order_relaxed)];
  if (job.n_parts > 1) loops.parts(job, begin, end, job.by_group ? worker.group : -1);
  else if (!job.by_group || job.parts->group == worker.group) loops.one_part(job, begin, end);
}

// Index of the first id that lies in no part, -1 when all are good.
int64_t first_bad(const Job& job) {
  const int64_t total = job.total;
  if (job.n_parts == 1) {
    const uint64_t first = static_cast<uint64_t>(job.parts->first_row), rows = static_cast<uint64_t>(job.parts->rows);
    bool bad = false;  // without a way out of the loop it becomes vector code
    for (int64_t index = 0; index < total; ++index) bad |= static_cast<uint64_t>(job.ids[index]) - first >= rows;
    if (!bad) return -1;
  }
  for (int64_t index = 0; index < total; ++index)
    if (!part_of(job, job.ids[index])) return index;
  return -1;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int ds41_abi() { return kAbi; }

// Name of the gather loops in use. `force` (for tests and benchmarks): "portable", "avx2", "avx512"; NULL changes
// nothing. NULL is returned for loops that this build or processor does not have.
const char* ds41_loops(const char* force) {
  return choose_loops(kLoops, best_loops(), chosen_loops, force);
}

// `count` workers, the first of which is the calling thread itself (never pinned). cpus[i] -1 leaves worker i free.
// NULL when there is no memory or no thread to be had.
Pool* ds41_pool_new(int32_t count, const int32_t* groups, const int32_t* cpus) {
  if (count < 1) return nullptr;
  try {
    std::vector<Worker> workers;
    for (int number = 0; number < count; ++number) {
      int rank = 0, peers = 0;
      for (int other = 0; other < count; ++other)
        if (groups[other] == groups[number]) {
          rank += other < number;
          ++peers;
        }
      workers.push_back({groups[number], rank, peers, number ? cpus[number] : -1});
    }
    return new Pool(std::move(workers));
  } catch (...) {
    return nullptr;
  }
}

void ds41_pool_free(Pool* pool) { delete pool; }

void ds41_pool_counters(const Pool* pool, Ds41Counters* out) {
  out->calls = pool->calls.load();
  out->rows = pool->rows.load();
  out->bytes = out->rows * kRecord;
  out->nanoseconds = pool->nanoseconds.load();
}

// out[i] = record of row ids[i]. Returns -1, or the index of the first id that lies in no part: then nothing was read.
// -2: a part belongs to a group without workers.
int64_t ds41_gather(
    Pool* pool, const Ds41Part* parts, int64_t n_parts, const int64_t* ids, int64_t total, uint8_t* out) {
  if (total <= 0) return -1;
  const auto started = std::chrono::steady_clock::now();
  Job job{parts, n_parts, ids, total, out, false};
  const int64_t bad = first_bad(job);
  if (bad >= 0) return bad;
  std::lock_guard<std::mutex> hold(pool->mutex);
  if (total <= kAlone || pool->size() == 1) {
    share({0, 0, 1, -1}, &job);
  } else {
    job.by_group = pool->grouped();
    for (int64_t number = 0; job.by_group && number < n_parts; ++number)
      if (!pool->has_group(parts[number].group)) return -2;
    pool->run(share, &job);
  }
  pool->calls.fetch_add(1);
  pool->rows.fetch_add(static_cast<uint64_t>(total));
  pool->nanoseconds.fetch_add(static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - started).count()));
  return -1;
}

// Places `rows` rows of `width` bytes at stride 264: the builder's half of a record.
void ds41_scatter(uint8_t* records, const uint8_t* source, int64_t rows, int64_t width) {
  if (width == 256)
    for (int64_t row = 0; row < rows; ++row) std::memcpy(records + row * kRecord, source + row * 256, 256);
  else if (width == 8)
    for (int64_t row = 0; row < rows; ++row) std::memcpy(records + row * kRecord, source + row * 8, 8);
  else
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(records + row * kRecord, source + row * width, static_cast<size_t>(width));
}

// The first row whose `width` bytes at stride 264 differ from the source, -1 when all are equal.
int64_t ds41_compare(const uint8_t* records, const uint8_t* source, int64_t rows, int64_t width) {
  for (int64_t row = 0; row < rows; ++row)
    if (std::memcmp(records + row * kRecord, source + row * width, static_cast<size_t>(width))) return row;
  return -1;
}

}  // extern "C"
#pragma GCC visibility pop
