// Opening a snapshot: nothing in the file is used before it is known to lie inside it.
#include "kvtable/snapshot.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <unordered_set>
#include <utility>

#include "base/crc32c.h"
#include "snapshot/format.h"
#include "snapshot/snapshot_file.h"

namespace kvtable {
namespace {

namespace format = snapshot_format;

[[noreturn]] void ThrowBad(const SnapshotFile& file, const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument,
              "opening '" + file.path() + "': " + what + "; the file is damaged or not whole, copy it again");
}

std::string Hex(uint32_t value) {
  char text[16];
  std::snprintf(text, sizeof(text), "0x%08x", value);
  return text;
}

// Whether [offset, offset + bytes) lies in [0, end).
bool Inside(uint64_t offset, uint64_t bytes, uint64_t end) { return offset <= end && bytes <= end - offset; }

void CheckCrc(const SnapshotFile& file, const char* what, uint64_t offset, uint64_t bytes,
              uint32_t expected) {
  const uint32_t got = ExtendCrc32c(0, file.data() + offset, static_cast<size_t>(bytes));
  if (got != expected) {
    ThrowBad(file,
             std::string("the checksum of its ") + what + " is " + Hex(got) + ", expected " + Hex(expected));
  }
}

// a * b, or more than any file has.
uint64_t Product(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

SnapshotTable::Layout LayoutOf(const SnapshotFile& file, const format::TableRecord& record,
                               const uint8_t* description, uint64_t description_bytes) {
  SnapshotTable::Layout layout;
  if (!Inside(record.name_offset, record.name_bytes, description_bytes)) {
    ThrowBad(file, "the name of a table lies outside its description");
  }
  layout.name.assign(reinterpret_cast<const char*>(description) + record.name_offset, record.name_bytes);
  const auto bad = [&](const std::string& what) {
    ThrowBad(file, "table '" + layout.name + "' has " + what);
  };

  if (record.key_type < 1 || record.key_type > std::size(format::kKeyTypes)) {
    bad("key type " + std::to_string(record.key_type) + ", expected 1 to 3");
  }
  if (record.value_type < 1 || record.value_type > std::size(format::kValueTypes)) {
    bad("value type " + std::to_string(record.value_type) + ", expected 1 to 8");
  }
  layout.key_type = format::kKeyTypes[record.key_type - 1];
  layout.value_type = format::kValueTypes[record.value_type - 1];
  layout.form = static_cast<RowForm>(record.row_form);
  const bool quantized = layout.form != RowForm::kPlain;
  if (record.row_form >= kRowForms || (quantized && layout.value_type != ValueType::kFloat32)) {
    bad("rows of form " + std::to_string(record.row_form) + ", which this version does not read");
  }
  if (record.frequency_type > format::kCounterTypes || record.version_type > format::kCounterTypes) {
    bad("frequencies or versions of an unknown type");
  }
  if (record.dim == 0 || record.dim > INT32_MAX) bad("dimension " + std::to_string(record.dim));
  layout.dim = record.dim;
  const uint64_t value_bytes = record.dim * static_cast<uint64_t>(SizeOf(layout.value_type));
  const uint64_t row_bytes =
      quantized ? static_cast<uint64_t>(QuantizedRowBytes(layout.form, layout.dim)) : value_bytes;
  if (record.row_bytes != row_bytes) {
    bad("rows of " + std::to_string(record.row_bytes) + " bytes, expected " + std::to_string(row_bytes));
  }
  layout.row_bytes = static_cast<int64_t>(row_bytes);
  if (record.rows > static_cast<uint64_t>(INT64_MAX) / 16 || record.buckets == 0 ||
      record.buckets > static_cast<uint64_t>(INT64_MAX) / 16) {
    bad(std::to_string(record.rows) + " rows in " + std::to_string(record.buckets) + " buckets");
  }
  layout.rows = static_cast<int64_t>(record.rows);
  layout.buckets = static_cast<int64_t>(record.buckets);
  if (record.entry_bytes != 4 && record.entry_bytes != 8) {
    bad("a directory of " + std::to_string(record.entry_bytes) + " bytes an entry, expected 4 or 8");
  }
  layout.wide_directory = record.entry_bytes == 8;
  layout.frequency_type = record.frequency_type;
  layout.version_type = record.version_type;

  const uint64_t default_bytes = record.sections[SnapshotTable::kDefaultRow].bytes;
  const uint64_t expected[SnapshotTable::kSections] = {
      Product(record.buckets + 1, record.entry_bytes),
      Product(record.rows, 8),
      Product(record.rows, row_bytes),
      Product(record.rows, static_cast<uint64_t>(format::kCounterBytes[record.frequency_type])),
      Product(record.rows, static_cast<uint64_t>(format::kCounterBytes[record.version_type])),
      default_bytes == 0 ? 0 : value_bytes,
  };
  for (int i = 0; i < SnapshotTable::kSections; ++i) {
    const format::SectionRecord& section = record.sections[i];
    if (section.bytes != expected[i] || section.offset % format::kAlignment != 0 ||
        !Inside(section.offset, section.bytes, static_cast<uint64_t>(file.bytes()))) {
      bad(std::string("its ") + format::kSectionNames[i] + " at byte " + std::to_string(section.offset) +
          ", " + std::to_string(section.bytes) + " bytes of the file's " + std::to_string(file.bytes()) +
          ", expected " + std::to_string(expected[i]));
    }
    layout.sections[i] = {static_cast<int64_t>(section.offset), static_cast<int64_t>(section.bytes)};
  }
  return layout;
}

}  // namespace

Snapshot::Snapshot(std::unique_ptr<SnapshotFile> file) : file_(std::move(file)) {}
Snapshot::~Snapshot() = default;

std::shared_ptr<Snapshot> Snapshot::Open(const std::string& path) {
  std::shared_ptr<Snapshot> snapshot(new Snapshot(std::make_unique<SnapshotFile>(path)));
  SnapshotFile& file = *snapshot->file_;
  const auto file_bytes = static_cast<uint64_t>(file.bytes());

  format::Header header = {};
  if (file.bytes() >= 8 && std::memcmp(file.data(), format::kMagic, sizeof(format::kMagic)) != 0) {
    throw Error(
        ErrorCode::kInvalidArgument,
        "opening '" + path + "': it does not begin as a snapshot does; see `kvtools migrate --to snapshot`");
  }
  if (file.bytes() < format::kHeaderBytes) {
    ThrowBad(file, "got " + std::to_string(file.bytes()) + " bytes, expected a header of 128");
  }
  std::memcpy(&header, file.data(), sizeof(header));
  if (header.version > format::kVersion) {
    throw Error(ErrorCode::kInvalidArgument, "opening '" + path + "': got version " +
                                                 std::to_string(header.version) +
                                                 " of the format, expected at most 1; update kvtools");
  }
  CheckCrc(file, "header", 0, format::kHeaderBytes - 4, header.header_crc);
  if (header.version != format::kVersion) ThrowBad(file, "got version 0 of the format, expected 1");
  if (header.file_bytes != file_bytes) {
    ThrowBad(file, "it has " + std::to_string(file_bytes) + " bytes, its header says " +
                       std::to_string(header.file_bytes));
  }
  if (!Inside(header.description_offset, header.description_bytes, file_bytes) ||
      header.description_offset % 8 != 0 ||
      !Inside(header.checksums_offset, header.checksums_bytes, file_bytes) ||
      header.checksums_offset % 8 != 0) {
    ThrowBad(file, "its description or checksums lie outside it");
  }
  CheckCrc(file, "description", header.description_offset, header.description_bytes, header.description_crc);
  CheckCrc(file, "checksums", header.checksums_offset, header.checksums_bytes, header.checksums_crc);

  const uint8_t* const description = file.data() + header.description_offset;
  format::DescriptionStart start = {};
  const uint64_t records = Product(header.tables, sizeof(format::TableRecord));
  if (header.description_bytes < sizeof(start) || records > header.description_bytes - sizeof(start)) {
    ThrowBad(file, "its description is too short for " + std::to_string(header.tables) + " tables");
  }
  std::memcpy(&start, description, sizeof(start));
  if (!Inside(start.json_offset, start.json_bytes, header.description_bytes)) {
    ThrowBad(file, "its JSON lies outside its description");
  }
  file.description.assign(reinterpret_cast<const char*>(description) + start.json_offset, start.json_bytes);
  uint64_t pieces = 0;
  std::unordered_set<std::string> names;
  snapshot->tables_.reserve(header.tables);
  for (uint32_t i = 0; i < header.tables; ++i) {
    format::TableRecord record = {};
    std::memcpy(&record, description + sizeof(start) + i * sizeof(record), sizeof(record));
    SnapshotTable::Layout layout = LayoutOf(file, record, description, header.description_bytes);
    if (!names.insert(layout.name).second)
      ThrowBad(file, "two of its tables are called '" + layout.name + "'");
    for (int section = 0; section < SnapshotTable::kSections; ++section) {
      layout.first_checksum[section] = static_cast<int64_t>(pieces);
      pieces += static_cast<uint64_t>(format::Pieces(layout.sections[section].bytes));
    }
    layout.duplicates = static_cast<int64_t>(std::min<uint64_t>(record.duplicates, INT64_MAX));
    snapshot->tables_.emplace_back(&file, std::move(layout));
  }
  if (header.checksums_bytes != pieces * 4) {
    ThrowBad(file, "it has " + std::to_string(header.checksums_bytes) + " bytes of checksums, expected " +
                       std::to_string(pieces * 4));
  }
  file.checksums.resize(pieces);
  file.sound = std::vector<std::atomic<uint32_t>>(pieces);
  if (pieces > 0)
    std::memcpy(file.checksums.data(), file.data() + header.checksums_offset, header.checksums_bytes);
  file.Remember(header);
  file.Look();
  char text[40];
  std::snprintf(text, sizeof(text), "%016llx%016llx", static_cast<unsigned long long>(header.fingerprint[0]),
                static_cast<unsigned long long>(header.fingerprint[1]));
  snapshot->fingerprint_ = text;
  return snapshot;
}

const std::string& Snapshot::path() const { return file_->path(); }
int64_t Snapshot::bytes() const { return file_->bytes(); }
std::string Snapshot::identity() const { return file_->identity(); }
bool Snapshot::IsAt(const std::string& path) const { return file_->IsAt(path); }
const std::string& Snapshot::fingerprint() const { return fingerprint_; }
const std::string& Snapshot::description() const { return file_->description; }
const std::vector<SnapshotTable>& Snapshot::tables() const { return tables_; }
bool Snapshot::warm() const { return file_->warm.load(std::memory_order_acquire); }

bool Snapshot::resident() const { return file_->resident.load(std::memory_order_acquire); }
void Snapshot::Look() const { file_->Look(); }
void Snapshot::CheckUnchanged() const { file_->CheckUnchanged(); }
bool Snapshot::verifies_on_use() const { return file_->verify_on_use.load(std::memory_order_acquire); }
bool Snapshot::Trust(const std::string& identity) { return file_->EndVerifyOnUse(identity); }

void Snapshot::VerifyOnUse() {
  for (SnapshotTable& table : tables_) {
    table.ReadDefaultRow();  // the file may not have been here as a whole when it was opened
    table.Verify(SnapshotTable::kDefaultRow, 0, table.layout().sections[SnapshotTable::kDefaultRow].bytes);
  }
  file_->verify_on_use.store(true, std::memory_order_release);
}

const SnapshotTable* Snapshot::table(std::string_view name) const {
  for (const SnapshotTable& table : tables_) {
    if (table.name() == name) return &table;
  }
  return nullptr;
}

}  // namespace kvtable
