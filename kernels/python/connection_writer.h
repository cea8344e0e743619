// How the short ways of the server write to a connection: to its socket, where nothing of the transport's waits before.
#pragma once

#include <nanobind/nanobind.h>
#include <sys/socket.h>
#include <sys/types.h>

#include <cstddef>
#include <string_view>

namespace kvtable {

// Used with the GIL held. Nobody else may write to the transport between Begin() or Renew() and the last Write().
class ConnectionWriter {
 public:
  // `descriptor` is that of the socket, -1 where only the transport may write.
  void Begin(const nanobind::object& transport, int descriptor) {
    write_ = transport.attr("write");
    waiting_ = transport.attr("get_write_buffer_size");
    descriptor_ = descriptor;
    flushed_ = false;
  }

  // Somebody else may have written since.
  void Renew() { flushed_ = false; }

  void End() {
    descriptor_ = -1;
    write_ = waiting_ = nanobind::object();
  }

  void Write(std::string_view bytes) {
    size_t sent = 0;
    if (descriptor_ >= 0) {
      // What the transport has not sent yet comes first. Once it has sent all, only what is written here is under way.
      if (!flushed_) flushed_ = nanobind::cast<int64_t>(waiting_()) == 0;
      if (flushed_) {
        const ssize_t count = ::send(descriptor_, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
        if (count > 0) sent = static_cast<size_t>(count);  // what is wrong the transport finds out
        if (sent == bytes.size()) return;
        flushed_ = false;
      }
    }
    const nanobind::bytes rest(bytes.data() + sent, bytes.size() - sent);
    const nanobind::object write = write_;  // which may end this
    write(rest);
  }

 private:
  nanobind::object write_, waiting_;
  int descriptor_ = -1;
  bool flushed_ =
      false;  // the transport has nothing to send, and nobody has written by it since that was seen
};

}  // namespace kvtable
