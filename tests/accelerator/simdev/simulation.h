// A simulated accelerator: what its memory, its streams and its communication share.
//
// Streams are in the order of happens-before: each has a vector clock, and so has the host. A kernel is a step of its
// stream; it joins the clocks of what the stream has waited for. An access to memory that does not know of an earlier
// one, by this order, is a race, whatever the order in time was.
#pragma once

#include <ATen/ATen.h>
#include <Python.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace simdev {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// A stream of a device, in one number: kStreams * device + the id of the stream, 0 for the default stream.
using StreamKey = int64_t;
constexpr StreamKey kStreams = 1'000'000;
using Clock = std::map<StreamKey, uint64_t>;

// An operation of a communicator, which a thread of the communicator runs.
class Operation {
 public:
  explicit Operation(StreamKey stream) : stream(stream) {}
  // Blocks the host until the operation has ended; raises what it has failed with.
  void await();
  bool has_ended();
  // Ends the operation: with the clock of its stream, or with an error.
  void end(const std::string& error, const Clock& clock);
  const StreamKey stream;
  Clock clock() const { return clock_; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::string error_;
  Clock clock_;
};
using Operations = std::vector<std::shared_ptr<Operation>>;

// Guards all that follows, and is held for short times only. Whoever takes it lets go of Python's lock meanwhile: who holds
// this one may need Python's, as a copy of a tensor does that a Python object stands for.
class Lock {
 public:
  Lock() {
    if (Py_IsInitialized() && PyGILState_Check()) python_ = PyEval_SaveThread();
    state_.lock();
  }
  ~Lock() {
    state_.unlock();
    if (python_) PyEval_RestoreThread(python_);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  static std::recursive_mutex state_;
  PyThreadState* python_ = nullptr;
};
extern std::map<StreamKey, Clock> clocks;
extern Clock host;
// The operations that a stream waits for: the next kernel of the stream, and the host if it waits for the stream, block
// until they have ended.
extern std::map<StreamKey, Operations> awaited;

bool flag(const char* name);
void log(const std::string& text);
void join(Clock& into, const Clock& from);
StreamKey key_of(int device, int64_t stream);
StreamKey current_stream(int device);
c10::Stream stream_of(StreamKey key);
int64_t new_stream();
int physical(int device);
// Opens the context of a device in this process.
void open_context(int device);
void set_device(int device);
int current_device();
// Blocks the host until all operations that a stream waits for have ended.
void settle(StreamKey stream);
// The memory of a tensor may be freed before other streams have finished with it: they are known to use it.
void record_use(const at::Tensor& tensor);
// Copies as a kernel of the current stream, for which the host does not wait.
void copy_in_stream(const at::Tensor& from, const at::Tensor& to);

}  // namespace simdev
