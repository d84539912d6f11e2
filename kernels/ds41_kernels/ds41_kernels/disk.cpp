// Engram rows read from record files on disk, for machines without the memory: io_uring with O_DIRECT where the kernel
// and the filesystem have both, otherwise preads by the threads of a pool.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "pool.h"

using ds41::kRecord;
using ds41::Pool;
using ds41::Worker;

namespace {

constexpr int64_t kBlock = 4096;            // alignment that O_DIRECT needs everywhere
constexpr int64_t kSlot = 2 * kBlock;       // a record lies in one block or in two neighbours
constexpr unsigned kDepth = 128;            // reads in flight; 128 to 256 saturate an NVMe drive

struct File {
  int fd;         // buffered
  int direct_fd;  // O_DIRECT, -1 where the filesystem refuses it
  int64_t first_row;
  int64_t rows;
};

const File* file_of(const std::vector<File>& files, int64_t row) {
  for (const File& file : files)
    if (static_cast<uint64_t>(row) - static_cast<uint64_t>(file.first_row) < static_cast<uint64_t>(file.rows))
      return &file;
  return nullptr;
}

// The two rings of io_uring, by system calls alone.
class Ring {
 public:
  ~Ring() {
    if (slots_) std::free(slots_);
    if (sqes_ != MAP_FAILED) munmap(sqes_, kDepth * sizeof(io_uring_sqe));
    if (ring_ != MAP_FAILED) munmap(ring_, ring_bytes_);
    if (fd_ >= 0) close(fd_);
  }

  bool open() {
    io_uring_params params{};
    fd_ = static_cast<int>(syscall(SYS_io_uring_setup, kDepth, &params));
    if (fd_ < 0 || !(params.features & IORING_FEAT_SINGLE_MMAP)) return false;
    ring_bytes_ = std::max(
        params.sq_off.array + params.sq_entries * sizeof(uint32_t),
        params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe));
    ring_ = mmap(nullptr, ring_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, IORING_OFF_SQ_RING);
    sqes_ = mmap(
        nullptr, kDepth * sizeof(io_uring_sqe), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_,
        IORING_OFF_SQES);
    if (ring_ == MAP_FAILED || sqes_ == MAP_FAILED) return false;
    auto* const base = static_cast<uint8_t*>(ring_);
    const auto word = [base](uint32_t offset) { return reinterpret_cast<std::atomic<uint32_t>*>(base + offset); };
    sq_tail_ = word(params.sq_off.tail);
    sq_mask_ = *word(params.sq_off.ring_mask);
    sq_array_ = reinterpret_cast<uint32_t*>(base + params.sq_off.array);
    cq_head_ = word(params.cq_off.head);
    cq_tail_ = word(params.cq_off.tail);
    cq_mask_ = *word(params.cq_off.ring_mask);
    cqes_ = reinterpret_cast<io_uring_cqe*>(base + params.cq_off.cqes);
    slots_ = static_cast<uint8_t*>(std::aligned_alloc(kBlock, kDepth * kSlot));
    return slots_ != nullptr;
  }

  // Reads every id's record; 0 or -errno. EAGAIN and short reads are asked for again by the buffered way.
  int read(const std::vector<File>& files, const int64_t* ids, int64_t total, uint8_t* out) {
    struct Wanted {
      int64_t index;
      int64_t skip;  // bytes before the record in its slot
    };
    Wanted wanted[kDepth];
    uint32_t free_slots[kDepth];
    uint32_t n_free = kDepth;
    for (uint32_t slot = 0; slot < kDepth; ++slot) free_slots[slot] = slot;
    int64_t next = 0, done = 0;
    int failure = 0;
    unsigned unsubmitted = 0;
    while (done < total && !(failure && n_free == kDepth)) {
      for (; n_free && next < total && !failure; ++next) {
        const File* file = file_of(files, ids[next]);
        const int64_t at = (ids[next] - file->first_row) * kRecord;
        const int64_t begin = at / kBlock * kBlock;
        const uint32_t slot = free_slots[--n_free];
        wanted[slot] = {next, at - begin};
        const uint32_t tail = sq_tail_->load(std::memory_order_relaxed);
        auto* const entry = static_cast<io_uring_sqe*>(sqes_) + (tail & sq_mask_);
        std::memset(entry, 0, sizeof *entry);
        entry->opcode = IORING_OP_READ;
        entry->fd = file->direct_fd;
        entry->off = static_cast<uint64_t>(begin);
        entry->addr = reinterpret_cast<uint64_t>(slots_ + slot * kSlot);
        entry->len = at - begin + kRecord > kBlock ? kSlot : kBlock;
        entry->user_data = slot;
        sq_array_[tail & sq_mask_] = tail & sq_mask_;
        sq_tail_->store(tail + 1, std::memory_order_release);
        ++unsubmitted;
      }
      const long entered = syscall(SYS_io_uring_enter, fd_, unsubmitted, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
      if (entered < 0) {
        if (errno == EINTR || errno == EAGAIN || errno == EBUSY) continue;
        return -errno;
      }
      unsubmitted -= static_cast<unsigned>(entered);
      uint32_t head = cq_head_->load(std::memory_order_relaxed);
      for (; head != cq_tail_->load(std::memory_order_acquire); ++head) {
        const io_uring_cqe& event = cqes_[head & cq_mask_];
        const auto slot = static_cast<uint32_t>(event.user_data);
        const Wanted& one = wanted[slot];
        uint8_t* const to = out + one.index * kRecord;
        if (event.res >= one.skip + kRecord) {
          std::memcpy(to, slots_ + slot * kSlot + one.skip, kRecord);
        } else {
          const int status = event.res < 0 && event.res != -EAGAIN && event.res != -EINTR
                                 ? event.res
                                 : buffered(files, ids[one.index], to);
          if (status && !failure) failure = status;
        }
        free_slots[n_free++] = slot;
        ++done;
      }
      cq_head_->store(head, std::memory_order_release);
    }
    return failure;
  }

  static int buffered(const std::vector<File>& files, int64_t row, uint8_t* to) {
    const File* file = file_of(files, row);
    int64_t have = 0;
    while (have < kRecord) {
      const ssize_t got = pread(
          file->fd, to + have, static_cast<size_t>(kRecord - have), (row - file->first_row) * kRecord + have);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return -errno;
      if (!got) return -EIO;  // the file is shorter than its manifest says
      have += got;
    }
    return 0;
  }

 private:
  int fd_ = -1;
  void* ring_ = MAP_FAILED;
  size_t ring_bytes_ = 0;
  void* sqes_ = MAP_FAILED;
  std::atomic<uint32_t>*sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
  uint32_t sq_mask_ = 0, cq_mask_ = 0;
  uint32_t* sq_array_ = nullptr;
  io_uring_cqe* cqes_ = nullptr;
  uint8_t* slots_ = nullptr;
};

struct Read {
  const std::vector<File>* files;
  const int64_t* ids;
  int64_t total;
  uint8_t* out;
  std::atomic<int>* status;
};

void read_share(const Worker& worker, const void* argument) {
  const Read& read = *static_cast<const Read*>(argument);
  const int64_t end = read.total * (worker.rank + 1) / worker.peers;
  for (int64_t index = read.total * worker.rank / worker.peers; index < end && !read.status->load(); ++index) {
    const int status = Ring::buffered(*read.files, read.ids[index], read.out + index * kRecord);
    if (status) read.status->store(status);
  }
}

}  // namespace

struct Ds41Disk {
  std::vector<File> files;
  Ring ring;
  bool has_ring = false;
  std::mutex mutex;

  ~Ds41Disk() {
    for (const File& file : files) {
      if (file.fd >= 0) close(file.fd);
      if (file.direct_fd >= 0) close(file.direct_fd);
    }
  }
};

#pragma GCC visibility push(default)
extern "C" {

// Opens the record files of one table. `ring` 0 never uses io_uring. NULL with errno when a file cannot be opened.
Ds41Disk* ds41_disk_new(
    int32_t count, const char* const* paths, const int64_t* first_rows, const int64_t* rows, int32_t ring) {
  auto* disk = new Ds41Disk;
  bool direct = true;
  for (int number = 0; number < count; ++number) {
    const int fd = open(paths[number], O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
      const int reason = errno;
      delete disk;
      errno = reason;
      return nullptr;
    }
    const int direct_fd = ring ? open(paths[number], O_RDONLY | O_CLOEXEC | O_DIRECT) : -1;
    direct &= direct_fd >= 0;
    disk->files.push_back({fd, direct_fd, first_rows[number], rows[number]});
  }
  disk->has_ring = ring && direct && disk->ring.open();
  return disk;
}

void ds41_disk_free(Ds41Disk* disk) { delete disk; }

// 1: io_uring with O_DIRECT; 0: preads by threads.
int ds41_disk_uses_ring(const Ds41Disk* disk) { return disk->has_ring; }

// out[i] = record of ids[i]. -1 when done, the index of the first id that lies in no file (nothing was read), or
// -2 - errno when the system failed to read.
int64_t ds41_disk_gather(Ds41Disk* disk, Pool* pool, const int64_t* ids, int64_t total, uint8_t* out) {
  for (int64_t index = 0; index < total; ++index)
    if (!file_of(disk->files, ids[index])) return index;
  if (total <= 0) return -1;
  std::lock_guard<std::mutex> hold(disk->mutex);
  const auto started = std::chrono::steady_clock::now();
  int status = 0;
  if (disk->has_ring) {
    status = disk->ring.read(disk->files, ids, total, out);
  } else {
    std::atomic<int> failure{0};
    const Read read{&disk->files, ids, total, out, &failure};
    std::lock_guard<std::mutex> hold_pool(pool->mutex);
    if (pool->size() == 1) read_share({0, 0, 1, -1}, &read);
    else pool->run(read_share, &read);
    status = failure.load();
  }
  if (status) return -2 + status;
  pool->calls.fetch_add(1);
  pool->rows.fetch_add(static_cast<uint64_t>(total));
  pool->nanoseconds.fetch_add(static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - started).count()));
  return -1;
}

}  // extern "C"
#pragma GCC visibility pop
