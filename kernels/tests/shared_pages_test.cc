// Pieces of memory side by side, and the rows of shards that lie in them.
#include "memory/shared_pages.h"

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "check.h"
#include "kvtable/parallel_for.h"
#include "kvtable/table.h"
#include "table/row_pieces.h"

namespace kvtable {
namespace {

void PiecesAreZeroedAndApart() {
  for (const bool huge_pages : {false, true}) {
    SharedPages pages(8, huge_pages, "a test");
    CHECK(pages.piece_bytes() % kPage == 0);
    std::vector<SharedPages::Piece> pieces;
    const auto sizes = {kPage, 3 * kPage, pages.piece_bytes(), kHugePage, 3 * kHugePage, kPage};
    for (int round = 0; round < 20; ++round) {
      for (const size_t bytes : sizes) {
        pieces.push_back(pages.Take(bytes));
        for (size_t i = 0; i < bytes; i += kPage / 2) CHECK(pieces.back().data[i] == 0);
        std::memset(pieces.back().data, static_cast<int>(pieces.size() % 251) + 1, bytes);
      }
    }
    size_t p = 0;
    for (int round = 0; round < 20; ++round) {
      for (const size_t bytes : sizes) {
        const char wanted = static_cast<char>(++p % 251 + 1);
        const char* const data = pieces[p - 1].data;
        CHECK(data[0] == wanted && data[bytes / 2] == wanted && data[bytes - 1] == wanted);
      }
    }
    SharedPages::GiveBack(pieces[2].data, pages.piece_bytes());
    CHECK(pieces[2].data[0] == 0 && pieces[1].data[0] == 3 && pieces[3].data[0] == 5);
    pieces.clear();
    CHECK(pages.idle_bytes() == 0);
    CHECK(pages.Take(kPage).data[0] == 0);  // of new memory
  }
}

// Rows of every size, also of more than a piece: each at an address of its own, and the runs that they lie in.
void RowsHavePlacesOfTheirOwn() {
  for (const int64_t row_bytes : {1, 3, 64, 100, 4096, 5000, 200'000, 700'000}) {
    const auto pages = std::make_shared<SharedPages>(8, true, "a test");
    RowPieces one(row_bytes, pages);
    RowPieces other(row_bytes, pages);
    CHECK(one.TouchedBytes(0) == 0);
    const uint32_t rows = row_bytes < 4096 ? 50'000 : 50;
    for (uint32_t row = 0; row < rows; ++row) {
      for (RowPieces* each : {&one, &other}) {
        if (each->capacity() == row) each->Grow();
        const char mark = static_cast<char>((row * 2 + (each == &other ? 1 : 0)) % 127);
        std::memset(each->Row(row), mark, static_cast<size_t>(row_bytes));
      }
    }
    for (uint32_t row = 0; row < rows; ++row) {
      CHECK(one.Row(row)[row_bytes - 1] == static_cast<char>(row * 2 % 127));
      CHECK(other.Row(row)[0] == static_cast<char>((row * 2 + 1) % 127));
      if (one.Run(row) > 1 && row + 1 < rows) CHECK(one.Row(row + 1) == one.Row(row) + row_bytes);
    }
    const size_t live = static_cast<size_t>(row_bytes) * rows;
    CHECK(one.TouchedBytes(rows) >= live && one.TouchedBytes(rows) <= one.capacity() * (row_bytes + kPage));
    one.Clear();
    CHECK(one.capacity() == 0 && one.TouchedBytes(0) == 0);
    one.Grow();
    CHECK(one.Row(0)[0] == 0 && other.Row(1)[0] == 3);
  }
}

// However many shards share a table, and however few rows it has: what lies idle.
void LittleLiesIdle() {
  for (const int shards : {1, 2, 8, 64}) {
    for (const int64_t dim : {8, 64}) {
      TableOptions options;
      options.dim = dim;
      options.shards = shards;
      const auto table = Table::Create(options);
      std::vector<int64_t> keys(4'000);
      const std::vector<float> values(keys.size() * static_cast<size_t>(dim), 1.0f);
      int64_t next = 0;
      for (const int64_t rows : {int64_t{100}, int64_t{4'000}, int64_t{100'000}, int64_t{200'000}}) {
        while (next < rows) {
          const int64_t n = std::min<int64_t>(rows - next, static_cast<int64_t>(keys.size()));
          for (int64_t i = 0; i < n; ++i) keys[static_cast<size_t>(i)] = next++;
          table->Upsert(keys.data(), n, values.data(), {}, Serial());
        }
        const MemoryUse use = table->Memory();
        CHECK(use.slack_bytes >= 0);
        // A page for each shard, then a piece for each and a huge page for all.
        const int64_t most = rows <= 4'000 ? shards * int64_t{kPage} : int64_t{7} << 20;
        CHECK(use.slack_bytes <= most);
      }
    }
  }
}

}  // namespace
}  // namespace kvtable

int main() {
  kvtable::PiecesAreZeroedAndApart();
  kvtable::RowsHavePlacesOfTheirOwn();
  kvtable::LittleLiesIdle();
  return 0;
}
