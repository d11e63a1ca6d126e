// Products of bfloat16 by AMX's tiles: 16 rows of up to 64 bytes each, and one instruction for all products of two of them,
// added to a third of float32.
//
// A slab of 32 inputs is a tile wide. A tile of rows is as they are laid out; a tile of weights is half a panel's slab,
// whose words hold two inputs of one output, as the instruction wants them. It sums the products of the even inputs and
// those of the odd ones, each in order, adds the two, and adds that to the sum of the slabs before. So each output is one
// sum in one order still, whatever the other rows of its tile are: batch-invariant like all others.
#pragma once

#include "simd.h"

#if defined(LEGATO_AMX)
#include <cerrno>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace legato {

constexpr int kAmxRows = 16;
constexpr int kAmxBytes = 64;  // of a row
constexpr int kAmxDepth = kAmxBytes / 2;  // Inputs, dimensions or keys that one instruction sums over.
constexpr int kMostAmxRows = 2 * kAmxRows;

#if defined(LEGATO_AMX)

constexpr bool kHasAmx = true;

// Ask the system for tiles; 0, or what it refused with. Once in a process, before any of its threads uses one.
inline int permit_amx() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM and XFEATURE_XTILEDATA of Linux
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? 0 : errno;
}

// The intrinsics do not tell the compiler what memory they read and write. To come between them and what it writes and reads;
// known is a place that no other code has been told of.
inline void settle_memory(const void* known = nullptr) { asm volatile("" ::"r"(known) : "memory"); }

// How a thread has its tiles at the moment: for how many rows. Tiles 0 to 3 are sums: 0 and 1 of the first 16 rows; 2 and 3
// of the rows beyond, or, where there are none, of the first 16 again, by other weights. 4 and 5 are those rows, 6 and 7
// weights.
inline thread_local int amx_rows = 0;

inline void shape_amx(int num_rows) {
  if (amx_rows == num_rows) return;
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } shape;
  const int first = num_rows < kAmxRows ? num_rows : kAmxRows;
  const int second = num_rows > kAmxRows ? num_rows - kAmxRows : first;
  const int rows[8] = {first, first, second, second, first, second, kAmxRows, kAmxRows};
  for (int tile = 0; tile < 8; ++tile) {
    shape.row_bytes[tile] = kAmxBytes;
    shape.rows[tile] = (uint8_t)rows[tile];
  }
  settle_memory(&shape);
  _tile_loadconfig(&shape);
  amx_rows = num_rows;
}

// Give the tiles back: the system need not save them when it switches threads, the core may sleep, and whoever else uses
// tiles on this thread (torch does) may shape them as they like.
inline void release_amx() {
  if (amx_rows == 0) return;
  _tile_release();
  amx_rows = 0;
}

#else

constexpr bool kHasAmx = false;
inline int permit_amx() { return 0; }
inline void release_amx() {}

#endif

}  // namespace legato
