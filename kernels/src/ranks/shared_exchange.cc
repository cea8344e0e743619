#include "kvtable/shared_exchange.h"

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "kvtable/types.h"
#include "ranks/rank_sockets.h"
#include "ranks/shared_buffers.h"

namespace kvtable {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kLookAfterMs = 1000;  // at what waits for long, and is idle
constexpr int kLookForRoomMs = 100;
constexpr size_t kMostWaitsTold = 10;
constexpr size_t kMostNameBytes = 64 << 10;
constexpr const char* kOf = " of ";  // in a name: of which op in the graph

enum class What : uint32_t {
  kSends,    // a part of an exchange
  kCannot,   // no part of it can be sent; why is in place of the kind
  kHasRead,  // what was sent as `number`
  kDropped,  // buffer `buffer`: it will not be sent from any more
  kMaps,     // `buffer`, with the file that came with `number`
  kLacks,    // it could not be mapped: its file is wanted once more
  kCanRead,  // all parts of an exchange; or, where there is something in place of the kind, not, and why
};

// A message; the name and the kind follow it.
struct Head {
  What what = What::kSends;
  uint32_t name_bytes = 0;
  uint32_t has_file = 0;  // 1: that of the buffer comes along
  uint32_t is_new = 0;    // 1: some rank may not have mapped the buffer, and might not be able to
  uint64_t number = 0;
  uint64_t buffer = 0;
  int64_t buffer_bytes = 0;
  int64_t begin = 0;  // of the part, in the buffer
  int64_t bytes = 0;
};

std::string ToMessage(const Head& head, const std::string& name = "", const std::string& kind = "") {
  return std::string(reinterpret_cast<const char*>(&head), sizeof head) + name + kind;
}

// A buffer of another rank, mapped here.
class Mapped {
 public:
  Mapped(int file, int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    void* const data = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED | MAP_POPULATE, file, 0);
    data_ = data == MAP_FAILED ? nullptr : static_cast<const char*>(data);
    if (data_ == nullptr) why_not_ = std::strerror(errno);
  }
  ~Mapped() {
    if (data_ != nullptr) munmap(const_cast<char*>(data_), bytes_);
  }
  Mapped(const Mapped&) = delete;
  Mapped& operator=(const Mapped&) = delete;

  const char* data() const { return data_; }  // null where it could not be mapped
  const std::string& why_not() const { return why_not_; }

 private:
  const size_t bytes_;
  const char* data_;
  std::string why_not_;
};

struct Theirs {
  std::shared_ptr<const Mapped> mapped;  // null: not yet
  std::string problem;                   // why not
};

// What another rank has said that it sends.
struct Came {
  std::string kind;
  uint64_t number = 0;
  int64_t bytes = 0;
  SharedExchange::Piece piece;
  std::shared_ptr<const Mapped> mapped;
  bool is_new = false;  // see Head
  std::string problem;  // why nothing was sent
  std::string unread;   // why this rank cannot read it
};

// What this rank has started. Without `ended` it was cancelled.
struct Started {
  uint64_t number;
  std::string kind;
  std::string problem;  // why nothing was sent
  SharedExchange::Piece own;
  std::shared_ptr<void> owner;
  SharedExchange::Ended ended;
  Clock::time_point since;
  bool is_new = false;    // see Head
  bool has_told = false;  // the others whether it can read all
};

// All under way of a name, the first first. Parts of the others may be here before this rank has started.
struct Channel {
  explicit Channel(int ranks) : came(static_cast<size_t>(ranks)), can_read(static_cast<size_t>(ranks)) {}

  bool is_over() const {
    return started.empty() &&
           std::all_of(came.begin(), came.end(), [](const auto& of) { return of.empty(); });
  }

  // Whether all ranks wait until each has said that it can read the first, of which all parts are here. A rank
  // that cannot would fail alone, and the others wait for what it does next. All know it of all parts.
  bool is_to_be_confirmed() const {
    bool is_new = started.front().is_new;
    if (!started.front().problem.empty()) return false;
    for (const auto& of : came) {
      if (of.empty()) continue;  // this rank
      if (!of.front().problem.empty()) return false;
      is_new |= of.front().is_new;
    }
    return is_new;
  }

  std::deque<Started> started;
  std::vector<std::deque<Came>> came;             // by rank
  std::vector<std::deque<std::string>> can_read;  // by rank: empty, or why it cannot
};

// What was sent, and who has yet to read it.
struct Unread {
  std::shared_ptr<void> owner;
  std::shared_ptr<SharedBuffer> buffer;
  std::vector<bool> by;
};

// What is called, and what goes, once no lock is held.
struct Afterwards {
  std::vector<std::function<void()>> calls;
  std::vector<Unread> read;

  void Run() {
    for (const auto& call : calls) call();
  }
};

}  // namespace

class SharedExchange::State : public std::enable_shared_from_this<State>, private RankSockets::Receiver {
 public:
  State(int rank, std::vector<int> sockets, Options options)
      : rank_(rank),
        ranks_(static_cast<int>(sockets.size())),
        options_(std::move(options)),
        buffers_(std::make_shared<SharedBuffers>()),
        sockets_(rank, std::move(sockets), options_.held_up_for),
        mapped_(static_cast<size_t>(ranks_)),
        known_(static_cast<size_t>(ranks_)),
        maps_(static_cast<size_t>(ranks_)) {}

  void Begin() {
    thread_ = std::thread([state = shared_from_this()] { state->ReceiveAll(); });
  }

  void AwaitSent() {
    const auto until = Clock::now() + options_.last_words_for;
    for (;;) {
      RankSockets::Awaited awaited;
      {
        const std::lock_guard<std::mutex> hold(mutex_);
        sockets_.SendUnsent();
        if (!sockets_.has_unsent() || Clock::now() >= until) return;
        awaited = sockets_.ToAwait(false);
      }
      RankSockets::Wait(std::move(awaited), kLookForRoomMs);
    }
  }

  void End() {
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      ended_ = true;
      sockets_.Wake();
    }
    if (thread_.get_id() == std::this_thread::get_id()) {
      thread_.detach();
    } else {
      thread_.join();
    }
  }

  int ranks() const { return ranks_; }

  bool is_idle() const {
    const std::lock_guard<std::mutex> hold(mutex_);
    return !lost_ && channels_.empty();
  }

  std::shared_ptr<SharedBuffer> Take(int64_t bytes) {
    try {
      return buffers_->Take(bytes);
    } catch (const Error&) {
      SharedBuffers::Idle idle = buffers_->DropIdle({});
      if (idle.empty()) throw;
      Forget(std::move(idle));
      return buffers_->Take(bytes);
    }
  }

  std::shared_ptr<SharedBuffer> Holding(const char* data, int64_t bytes) const {
    return buffers_->Holding(data, bytes);
  }

  uint64_t Start(Sent sent, Ended ended) {
    if (sent.name.size() + sent.kind.size() > kMostNameBytes) {
      throw Error(ErrorCode::kInvalidArgument, "the name of an exchange has " +
                                                   std::to_string(sent.name.size()) +
                                                   " bytes, more than may be: give the lookup a shorter one");
    }
    Afterwards afterwards;
    uint64_t number;
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      const auto it = channels_.try_emplace(sent.name, ranks_).first;
      std::deque<Started>& started = it->second.started;
      if (!started.empty() && started.back().ended) {
        throw Error(ErrorCode::kInvalidArgument, "an exchange '" + sent.name +
                                                     "' is under way on this rank already: give each lookup "
                                                     "of a step, or of a thread, a `name` of "
                                                     "its own");
      }
      number = next_number_++;
      if (!sent.problem.empty()) sent.problem = "rank " + std::to_string(rank_) + ": " + sent.problem;
      started.push_back({number, sent.kind, sent.problem, {}, sent.owner, std::move(ended), Clock::now()});
      SendParts(number, std::move(sent), &started.back());
      Match(it, &afterwards);
    }
    afterwards.Run();
    return number;
  }

  void Cancel(uint64_t number) {
    Afterwards afterwards;
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      for (auto& [name, channel] : channels_) {
        for (Started& started : channel.started) {
          if (started.number != number || !started.ended) continue;
          Fail(&started, ExchangeFailure::Kind::kCancelled, "exchange '" + name + "' was cancelled",
               &afterwards);
        }
      }
    }
    afterwards.Run();
  }

 private:
  using Channels = std::map<std::string, Channel>;

  // What came of a rank in an exchange that is over, read or not.
  struct Part {
    int rank;
    uint64_t number;
    std::shared_ptr<const Mapped> mapped;
  };

  class ArrivalHere : public Arrival {
   public:
    ArrivalHere(std::shared_ptr<State> state, std::shared_ptr<void> own)
        : state_(std::move(state)), own_(std::move(own)) {}
    ~ArrivalHere() override { state_->HasRead(parts); }

    std::vector<Part> parts;

   private:
    const std::shared_ptr<State> state_;
    const std::shared_ptr<void> own_;
  };

  // ---- Of the calling threads ----------------------------------------------------------------------------

  void SendParts(uint64_t number, Sent sent, Started* started) {
    if (!sent.problem.empty()) {
      const Head head{What::kCannot, static_cast<uint32_t>(sent.name.size()), 0, 0, number};
      for (int r = 0; r < ranks_; ++r) {
        if (r != rank_ && !sockets_.is_gone(r)) sockets_.Send(r, ToMessage(head, sent.name, sent.problem));
      }
      return;
    }
    const char* at = sent.data;
    Unread unread{std::move(sent.owner), sent.buffer, std::vector<bool>(static_cast<size_t>(ranks_))};
    for (int r = 0; r < ranks_; ++r) {
      const size_t to = static_cast<size_t>(r);
      if (r == rank_ || sent.bytes[to] == 0 || sockets_.is_gone(r)) continue;
      started->is_new |= maps_[to].count(sent.buffer->number()) == 0;
    }
    for (int r = 0; r < ranks_; ++r) {
      const int64_t bytes = sent.bytes[static_cast<size_t>(r)];
      if (r == rank_) {
        started->own = {at, bytes};
      } else if (!sockets_.is_gone(r)) {
        Head head{What::kSends, static_cast<uint32_t>(sent.name.size()), 0, started->is_new, number};
        int file = RankSockets::kNoFile;
        if (bytes > 0) {
          head.buffer = sent.buffer->number();
          head.buffer_bytes = sent.buffer->bytes();
          head.begin = at - sent.buffer->data();
          head.bytes = bytes;
          unread.by[static_cast<size_t>(r)] = true;
          if (known_[static_cast<size_t>(r)].insert(head.buffer).second) file = sent.buffer->file();
          head.has_file = file >= 0 ? 1 : 0;
        }
        sockets_.Send(r, ToMessage(head, sent.name, sent.kind), file);
      }
      at += bytes;
    }
    if (IsUnread(unread)) unread_.emplace(number, std::move(unread));
  }

  static bool IsUnread(const Unread& unread) {
    return std::find(unread.by.begin(), unread.by.end(), true) != unread.by.end();
  }

  void HasRead(const std::vector<Part>& parts) {
    if (process_ != getpid()) return;  // a fork's sockets are closed
    const std::lock_guard<std::mutex> hold(mutex_);
    for (const Part& part : parts) {
      Head head{What::kHasRead};
      head.number = part.number;
      sockets_.Send(part.rank, ToMessage(head));
    }
  }

  // Frees buffers, which the others may have mapped.
  void Forget(SharedBuffers::Idle idle) {
    if (idle.empty()) return;
    const std::lock_guard<std::mutex> hold(mutex_);
    for (const auto& buffer : idle) {
      Head head{What::kDropped};
      head.buffer = buffer->number();
      for (int r = 0; r < ranks_; ++r) {
        if (known_[static_cast<size_t>(r)].erase(head.buffer) > 0) sockets_.Send(r, ToMessage(head));
        maps_[static_cast<size_t>(r)].erase(head.buffer);
      }
    }
  }

  // ---- Under the lock ------------------------------------------------------------------------------------

  // Ends what of a channel can be ended, and the channel where nothing is left; returns the next one.
  Channels::iterator Match(Channels::iterator it, Afterwards* afterwards) {
    Channel& channel = it->second;
    while (!channel.started.empty()) {
      int lost = -1;
      bool all_came = true;
      for (int r = 0; r < ranks_; ++r) {
        if (r == rank_ || !channel.came[static_cast<size_t>(r)].empty()) continue;
        all_came = false;
        if (sockets_.is_gone(r)) lost = r;
      }
      if (!all_came && lost < 0) break;
      const bool is_confirmed = all_came && channel.is_to_be_confirmed();
      if (is_confirmed) {
        if (!channel.started.front().has_told) TellWhetherItCanRead(it->first, &channel);
        if (AwaitsConfirmation(channel)) break;
      }
      Started started = std::move(channel.started.front());
      channel.started.pop_front();
      std::vector<Came> came(static_cast<size_t>(ranks_));
      for (size_t r = 0; r < came.size(); ++r) {
        if (channel.came[r].empty()) continue;
        came[r] = std::move(channel.came[r].front());
        channel.came[r].pop_front();
        // Otherwise it is of the next one: a rank that has all parts of both is ahead of this one, which cancelled.
        if (!is_confirmed || channel.can_read[r].empty()) continue;
        // What another rank cannot read fails here, too.
        if (came[r].unread.empty()) came[r].unread = std::move(channel.can_read[r].front());
        channel.can_read[r].pop_front();
      }
      Deliver(it->first, std::move(started), std::move(came), lost, afterwards);
    }
    return channel.is_over() ? channels_.erase(it) : std::next(it);
  }

  void TellWhetherItCanRead(const std::string& name, Channel* channel) {
    channel->started.front().has_told = true;
    std::string problem;
    for (const auto& of : channel->came) {
      if (!of.empty() && problem.empty()) problem = of.front().unread;
    }
    const Head head{What::kCanRead, static_cast<uint32_t>(name.size())};
    for (int r = 0; r < ranks_; ++r) {
      if (r != rank_ && !sockets_.is_gone(r)) sockets_.Send(r, ToMessage(head, name, problem));
    }
  }

  bool AwaitsConfirmation(const Channel& channel) const {
    if (lost_) return false;  // a rank that lacks a part of the lost one says nothing, and fails
    for (int r = 0; r < ranks_; ++r) {
      if (r != rank_ && AwaitsConfirmation(channel, r)) return true;
    }
    return false;
  }
  // What a rank that has gone could have read is of no matter.
  bool AwaitsConfirmation(const Channel& channel, int rank) const {
    return channel.can_read[static_cast<size_t>(rank)].empty() && !sockets_.is_gone(rank);
  }

  void Deliver(const std::string& name, Started started, std::vector<Came> came, int lost,
               Afterwards* afterwards) {
    const auto arrival = std::make_shared<ArrivalHere>(shared_from_this(), started.owner);
    for (size_t r = 0; r < came.size(); ++r) {
      const int rank = static_cast<int>(r);
      arrival->pieces.push_back(rank == rank_ ? started.own : came[r].piece);
      if (came[r].bytes > 0) arrival->parts.push_back({rank, came[r].number, came[r].mapped});
    }
    // What tells the others that it was read goes without the lock, whether it is delivered or not.
    afterwards->calls.push_back([arrival] {});
    if (!started.ended) return;
    if (lost >= 0) {
      return Fail(&started, ExchangeFailure::Kind::kRankLost, LostText(name, lost), afterwards);
    }
    for (size_t r = 0; r < came.size(); ++r) {
      const std::string& unsent = static_cast<int>(r) == rank_ ? started.problem : came[r].problem;
      const std::string& problem = unsent.empty() ? came[r].unread : unsent;
      if (problem.empty()) continue;
      return Fail(&started, ExchangeFailure::Kind::kNoResource, "exchange '" + name + "': " + problem,
                  afterwards);
    }
    for (size_t r = 0; r < came.size(); ++r) {
      if (static_cast<int>(r) == rank_) continue;
      const std::string of = "exchange '" + name + "': rank " + std::to_string(r);
      if (came[r].kind != started.kind) {
        return Fail(&started, ExchangeFailure::Kind::kOtherKind,
                    of + " sends " + came[r].kind + ", and rank " + std::to_string(rank_) + " " +
                        started.kind + ": every rank makes the same calls in each step",
                    afterwards);
      }
    }
    afterwards->calls.back() = [arrival, ended = std::move(started.ended)] { ended(arrival, nullptr); };
  }

  std::string LostText(const std::string& name, int lost) const {
    if (const std::string& why = sockets_.why_gone(lost); !why.empty()) {
      return "rank " + std::to_string(rank_) + " has ended its connection to rank " + std::to_string(lost) +
             ", and exchange '" + name + "' with it: " + why;
    }
    return "rank " + std::to_string(lost) + " has ended, and rank " + std::to_string(rank_) +
           " waited for its part of exchange '" + name + "': its own output says why";
  }

  static void Fail(Started* started, ExchangeFailure::Kind kind, std::string what, Afterwards* afterwards) {
    afterwards->calls.push_back(
        [ended = std::move(started->ended), failure = ExchangeFailure{kind, std::move(what)}] {
          ended(nullptr, &failure);
        });
    started->ended = nullptr;
  }

  // ---- Of the thread -------------------------------------------------------------------------------------

  void ReceiveAll() {
    pthread_setname_np(pthread_self(), "kv-exchange");
    for (;;) {
      RankSockets::Awaited awaited;
      {
        const std::lock_guard<std::mutex> hold(mutex_);
        if (ended_) break;
        awaited = sockets_.ToAwait(true);
      }
      RankSockets::Wait(std::move(awaited), kLookAfterMs);
      const Clock::time_point now = Clock::now();
      const bool looks = now - looked_ >= std::chrono::milliseconds(kLookAfterMs);
      if (looks) looked_ = now;
      Afterwards afterwards;
      {
        const std::lock_guard<std::mutex> hold(mutex_);
        afterwards_ = &afterwards;
        sockets_.Receive(this);
        if (looks) LookAtWaits(now);
        afterwards_ = nullptr;
      }
      afterwards.Run();
      if (looks) Forget(buffers_->DropIdle(options_.idle_after));
    }
    Afterwards afterwards;
    {
      const std::lock_guard<std::mutex> hold(mutex_);
      for (auto& [name, channel] : channels_) {
        for (Started& started : channel.started) {
          if (!started.ended) continue;
          Fail(&started, ExchangeFailure::Kind::kRankLost,
               "the ranks were connected anew during exchange '" + name + "'", &afterwards);
        }
      }
    }
    afterwards.Run();
    AwaitSent();
    // Not only with the last who holds what came: the others are to know now.
    const std::lock_guard<std::mutex> hold(mutex_);
    sockets_.Close();
  }

  void Received(int rank, const char* bytes, size_t size, int file) override {
    Head head;
    std::memcpy(&head, bytes, sizeof head);
    const size_t r = static_cast<size_t>(rank);
    switch (head.what) {
      case What::kSends:
      case What::kCannot: {
        const std::string name(bytes + sizeof head, head.name_bytes);
        Came came;
        std::string& said = head.what == What::kSends ? came.kind : came.problem;
        said.assign(bytes + sizeof head + head.name_bytes, size - sizeof head - head.name_bytes);
        came.number = head.number;
        came.bytes = head.bytes;
        came.is_new = head.is_new != 0;
        if (head.bytes > 0) Map(rank, head, file, &came);
        const auto it = channels_.try_emplace(name, ranks_).first;
        it->second.came[r].push_back(std::move(came));
        Match(it, afterwards_);
        break;
      }
      case What::kHasRead: {
        const auto it = unread_.find(head.number);
        if (it != unread_.end()) WasRead(it, r);
        break;
      }
      case What::kDropped:
        mapped_[r].erase(head.buffer);
        break;
      case What::kMaps:
        maps_[r].insert(head.buffer);
        CloseWhereAllMap(head.number, head.buffer);
        break;
      case What::kLacks:
        known_[r].erase(head.buffer);
        break;
      case What::kCanRead: {
        // It has a part of this rank, which has thus started.
        const auto it = channels_.find(std::string(bytes + sizeof head, head.name_bytes));
        if (it == channels_.end()) break;
        it->second.can_read[r].emplace_back(bytes + sizeof head + head.name_bytes,
                                            size - sizeof head - head.name_bytes);
        Match(it, afterwards_);
        break;
      }
    }
    if (file >= 0) close(file);
  }

  void Gone(int rank) override {
    lost_ = true;
    const size_t r = static_cast<size_t>(rank);
    mapped_[r].clear();
    known_[r].clear();
    maps_[r].clear();
    for (auto it = unread_.begin(); it != unread_.end();) it = WasRead(it, r);
    for (auto it = channels_.begin(); it != channels_.end();) it = Match(it, afterwards_);
  }

  using AllUnread = std::map<uint64_t, Unread>;

  AllUnread::iterator WasRead(AllUnread::iterator it, size_t by) {
    it->second.by[by] = false;
    if (IsUnread(it->second)) return std::next(it);
    afterwards_->read.push_back(std::move(it->second));
    return unread_.erase(it);
  }

  // A process may have thousands of buffers under way, and of open files often no more than a thousand.
  void CloseWhereAllMap(uint64_t number, uint64_t buffer) {
    for (int r = 0; r < ranks_; ++r) {
      if (r != rank_ && !sockets_.is_gone(r) && maps_[static_cast<size_t>(r)].count(buffer) == 0) return;
    }
    // They say so before they say that they have read it.
    if (const auto it = unread_.find(number); it != unread_.end()) it->second.buffer->CloseFile();
  }

  // Returns why not.
  static std::string Map(int file, int64_t bytes, std::shared_ptr<const Mapped>* to) {
    if (file == RankSockets::kFileNotTaken) return "it has too many open files (see ulimit -n)";
    if (file == RankSockets::kNoFile) {
      return "that rank's user has too many files on their way between processes for its ulimit -n";
    }
    const auto mapped = std::make_shared<const Mapped>(file, bytes);
    if (mapped->data() == nullptr) {
      return std::to_string(bytes) + " bytes are more than it may map (" + mapped->why_not() +
             "; see ulimit -v)";
    }
    *to = mapped;
    return "";
  }

  // Where a part of another rank is in this process.
  void Map(int rank, const Head& head, int file, Came* came) {
    Theirs& theirs = mapped_[static_cast<size_t>(rank)][head.buffer];
    if (theirs.mapped == nullptr && head.has_file != 0) {
      theirs.problem = Map(file, head.buffer_bytes, &theirs.mapped);
      // What it lacks comes again with what is sent next: by then there may be room.
      Head answer{theirs.mapped == nullptr ? What::kLacks : What::kMaps};
      answer.number = head.number;
      answer.buffer = head.buffer;
      sockets_.Send(rank, ToMessage(answer));
    }
    if (theirs.mapped == nullptr) {
      came->unread = "rank " + std::to_string(rank_) + " cannot map what rank " + std::to_string(rank) +
                     " sends: " + theirs.problem;
      return;
    }
    came->mapped = theirs.mapped;
    came->piece = {theirs.mapped->data() + head.begin, head.bytes};
  }

  // Tells of exchanges that wait for long, or ends them.
  void LookAtWaits(Clock::time_point now) {
    std::vector<Wait> waits;
    for (auto& [name, channel] : channels_) {
      for (Started& started : channel.started) {
        const auto waited = now - started.since;
        if (!started.ended || waited < std::chrono::milliseconds(kLookAfterMs)) continue;
        const Wait wait{&name, &channel, waited};
        if (options_.fail_after.count() > 0 && waited >= options_.fail_after) {
          Fail(&started, ExchangeFailure::Kind::kStalled, WaitText({wait}), afterwards_);
        } else {
          waits.push_back(wait);
        }
      }
    }
    if (waits.empty() || !options_.warn || options_.warn_after.count() == 0) return;
    // What one rank does late many exchanges may wait for: they are told of together.
    std::stable_sort(waits.begin(), waits.end(),
                     [](const Wait& one, const Wait& other) { return one.waited > other.waited; });
    if (waits.front().waited < options_.warn_after || now < next_warning_) return;
    next_warning_ = now + options_.warn_after;
    afterwards_->calls.push_back([warn = options_.warn, text = WaitText(waits)] { warn(text); });
  }

  struct Wait {
    const std::string* name;
    const Channel* channel;
    Clock::duration waited;
  };

  std::string WaitText(const std::vector<Wait>& waits) const {
    std::string text = "rank " + std::to_string(rank_) + " has waited ";
    const char* before = "";
    bool differs = false;
    for (size_t w = 0; w < std::min(waits.size(), kMostWaitsTold); ++w) {
      text += before + WaitText(waits[w], &differs);
      before = "; ";
    }
    if (waits.size() > kMostWaitsTold) {
      text += "; and in " + std::to_string(waits.size() - kMostWaitsTold) + " more";
    }
    text += ": every rank makes the same calls in each step";
    if (!differs) return text;
    return text +
           ". These look like one call in graphs that differ: where a rank alone calls a tf.function or "
           "has a tf.cond or a loop in the step, what comes behind is named otherwise; have all ranks "
           "trace the same";
  }

  // `differs`: whether it looks as if the graphs of ranks do.
  std::string WaitText(const Wait& wait, bool* differs) const {
    const std::string& name = *wait.name;
    std::string text = std::to_string(std::chrono::duration_cast<std::chrono::seconds>(wait.waited).count()) +
                       " s in exchange '" + name + "' for";
    const bool all_came = AllCame(*wait.channel);
    const char* before = " ";
    for (int r = 0; r < ranks_; ++r) {
      const size_t of = static_cast<size_t>(r);
      if (r == rank_ || !(all_came ? AwaitsConfirmation(*wait.channel, r) : wait.channel->came[of].empty())) {
        continue;
      }
      text += before + ("rank " + std::to_string(r));
      before = ", ";
      if (all_came) text += " to map what was sent";
      for (const auto& [other, at] : channels_) {
        if (at.came[of].empty() || !at.started.empty()) continue;
        text += ", which is in '" + other + "'";
        *differs |= other.substr(0, other.find(kOf)) == name.substr(0, name.find(kOf));
        break;
      }
    }
    return text;
  }

  bool AllCame(const Channel& channel) const {
    for (int r = 0; r < ranks_; ++r) {
      if (r != rank_ && channel.came[static_cast<size_t>(r)].empty()) return false;
    }
    return true;
  }

  const pid_t process_ = getpid();
  const int rank_;
  const int ranks_;
  const Options options_;
  const std::shared_ptr<SharedBuffers> buffers_;
  std::thread thread_;
  // Of the thread.
  Clock::time_point looked_ = Clock::now();
  Clock::time_point next_warning_{};

  mutable std::mutex mutex_;  // for all below
  bool ended_ = false;
  bool lost_ = false;
  RankSockets sockets_;
  std::vector<std::unordered_map<uint64_t, Theirs>> mapped_;  // buffers of each rank
  std::vector<std::unordered_set<uint64_t>> known_;  // buffers of this one whose file was sent to each rank
  std::vector<std::unordered_set<uint64_t>> maps_;   // and that it has mapped
  Channels channels_;
  AllUnread unread_;
  uint64_t next_number_ = 1;
  Afterwards* afterwards_ = nullptr;  // of the thread, while it receives
};

// ---- Its calls, which a fork must not pass on: it has no thread, closed sockets, and locks that others held ------

SharedExchange::SharedExchange(int rank, std::vector<int> sockets, Options options)
    : process_(getpid()),
      rank_(rank),
      state_(std::make_shared<State>(rank, std::move(sockets), std::move(options))) {
  state_->Begin();
}

SharedExchange::~SharedExchange() {
  if (is_of_parent()) {
    [[maybe_unused]] const auto* const never_ended = new std::shared_ptr<State>(std::move(state_));
  } else {
    state_->End();
  }
}

bool SharedExchange::is_of_parent() const { return process_ != getpid(); }
int SharedExchange::ranks() const { return state_->ranks(); }
bool SharedExchange::is_idle() const { return state_->is_idle(); }
void SharedExchange::AwaitSent() { state_->AwaitSent(); }
void SharedExchange::RefuseFork() const {
  if (!is_of_parent()) return;
  throw Error(ErrorCode::kFailedPrecondition,
              "this process was forked from rank " + std::to_string(rank_) +
                  " and has no exchange with the other ranks: look up in the rank itself, or start the "
                  "process by itself (multiprocessing's 'spawn')");
}
std::shared_ptr<SharedBuffer> SharedExchange::Take(int64_t bytes) {
  RefuseFork();
  return state_->Take(bytes);
}
std::shared_ptr<SharedBuffer> SharedExchange::Holding(const char* data, int64_t bytes) const {
  return is_of_parent() ? nullptr : state_->Holding(data, bytes);
}
uint64_t SharedExchange::Start(Sent sent, Ended ended) {
  RefuseFork();
  return state_->Start(std::move(sent), std::move(ended));
}
void SharedExchange::Cancel(uint64_t started) {
  if (!is_of_parent()) state_->Cancel(started);
}

}  // namespace kvtable
