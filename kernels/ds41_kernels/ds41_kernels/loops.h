// Which of a library's loops (portable, avx2, avx512) runs: known by its name, and set by tests and benchmarks.
#pragma once

#include <atomic>
#include <cstring>

// Name of the loops in use; with `force` those are used from now on, NULL when this processor (`best`) has none such.
template <typename Loops>
const char* choose_loops(const Loops* table, int best, std::atomic<int>& chosen, const char* force) {
  if (force) {
    int found = best;
    while (found >= 0 && std::strcmp(table[found].name, force)) --found;
    if (found < 0) return nullptr;
    chosen.store(found);
  }
  return table[chosen.load()].name;
}
