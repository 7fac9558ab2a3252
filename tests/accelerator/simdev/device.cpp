// The simulated accelerator itself: devices, memory that only kernels may touch, streams and events.
//
// The memory is mapped without any right, so that code of the host that touches it dies. A kernel gives itself the right
// for as long as it runs: the kernels are those of the CPU, through torch's fallback for devices without their own.
#include "simulation.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <sys/mman.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <unistd.h>

#include <cstdio>
#include <set>
#include <sstream>

namespace simdev {

std::recursive_mutex Lock::state_;
std::map<StreamKey, Clock> clocks;
Clock host;
std::map<StreamKey, Operations> awaited;

namespace {

std::vector<int> visible;  // by index: the number of the device on this host
bool initialized = false;
bool driver_loaded = false;
bool forked = false;
std::set<int> contexts;
int races = 0;
int pinned = 0;
int64_t num_streams = 1;

thread_local int device_of_thread = 0;
thread_local std::map<int, int64_t> stream_of_thread;  // by device
thread_local bool in_kernel = false;

void after_fork() { forked = forked || initialized || driver_loaded; }

// As CUDA: the devices behind one that does not exist are not visible.
int count_devices() {
  const char* total = getenv("SIMDEV_COUNT");
  const int count = total ? atoi(total) : 2;
  const char* list = getenv("CUDA_VISIBLE_DEVICES");
  std::vector<int> found;
  if (!list) {
    for (int device = 0; device < count; ++device) found.push_back(device);
  } else {
    std::stringstream parts(list);
    for (std::string part; std::getline(parts, part, ',');) {
      if (part.empty() || !isdigit(part[0]) || atoi(part.c_str()) >= count) break;
      found.push_back(atoi(part.c_str()));
    }
  }
  Lock lock;
  if (!initialized) visible = found;
  return static_cast<int>(visible.size());
}

// As CUDA: the question whether there is a device loads the driver, after which a fork cannot use devices.
bool is_available() {
  driver_loaded = driver_loaded || flag("SIMDEV_DRIVER");
  return count_devices() > 0;
}

void initialize() {
  Lock lock;
  TORCH_CHECK(!forked, "Cannot re-initialize simdev in forked subprocess: use the 'spawn' start method");
  if (initialized) return;
  count_devices();
  initialized = true;
  log("initialized");
}

// A piece of memory, and who has used it last.
struct Block {
  size_t size;
  StreamKey home;  // the stream of the allocation
  StreamKey writer = -1;
  uint64_t written = 0;
  Clock reads;
  Clock uses;
  bool is_recorded = false;
};
std::map<uintptr_t, Block> blocks;

Block* block_of(const void* pointer, uintptr_t* start = nullptr) {
  auto next = blocks.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (next == blocks.begin()) return nullptr;
  auto& [first, block] = *--next;
  if (reinterpret_cast<uintptr_t>(pointer) >= first + block.size) return nullptr;
  if (start) *start = first;
  return &block;
}

std::string name_of(StreamKey key) {
  return "stream " + std::to_string(key % kStreams) + " of device " + std::to_string(key / kStreams);
}

void report_race(const std::string& text) {
  ++races;
  log("RACE " + text);
}

void record_access(Block& block, bool writes, StreamKey stream) {
  Clock& clock = clocks[stream];
  join(clock, host);
  const uint64_t now = ++clock[stream];
  if (block.writer >= 0 && clock[block.writer] < block.written)
    report_race((writes ? "write on " : "read on ") + name_of(stream) + " after a write on " + name_of(block.writer));
  if (writes) {
    for (const auto& [reader, read] : block.reads)
      if (clock[reader] < read) report_race("write on " + name_of(stream) + " after a read on " + name_of(reader));
    block.writer = stream;
    block.written = now;
    block.reads.clear();
  } else {
    block.reads[stream] = now;
  }
  block.uses[stream] = now;
}

// The access of a kernel to memory, for as long as it runs.
class Access {
 public:
  void add(const at::Tensor& tensor, bool writes, StreamKey stream) { add(tensor.data_ptr(), writes, stream); }
  void add(const void* pointer, bool writes, StreamKey stream) {
    uintptr_t start;
    Block* block = block_of(pointer, &start);
    if (!block) return;
    record_access(*block, writes, stream);
    mprotect(reinterpret_cast<void*>(start), block->size, PROT_READ | PROT_WRITE);
    opened_.push_back(start);
  }
  ~Access() {
    for (auto start : opened_)
      if (auto found = blocks.find(start); found != blocks.end())
        mprotect(reinterpret_cast<void*>(start), found->second.size, PROT_NONE);
  }

 private:
  Lock lock_;
  std::vector<uintptr_t> opened_;
};

void release(void* pointer) {
  Lock lock;
  auto found = blocks.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == blocks.end()) return;
  const Block& block = found->second;
  Clock& clock = clocks[block.home];
  for (const auto& [stream, used] : block.uses)
    if (!block.is_recorded && stream != block.home && clock[stream] < used && host[stream] < used)
      report_race("memory is freed, and may be given away, while it may be used on " + name_of(stream));
  munmap(pointer, block.size);
  blocks.erase(found);
}

size_t allocated() {
  Lock lock;
  size_t total = 0;
  for (const auto& [start, block] : blocks) total += block.size;
  return total;
}

struct Allocator final : at::Allocator {
  at::DataPtr allocate(size_t size) override {
    const int device = device_of_thread;
    open_context(device);
    const c10::Device on(kType, device);
    if (!size) return {nullptr, nullptr, &release, on};
    const size_t page = sysconf(_SC_PAGESIZE), whole = (size + page - 1) / page * page;
    const char* limit = getenv("SIMDEV_MEMORY");
    TORCH_CHECK_WITH(OutOfMemoryError, !limit || allocated() + whole <= std::stoull(limit), "simdev out of memory");
    void* memory = mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "simdev: out of memory");
    Lock lock;
    blocks[reinterpret_cast<uintptr_t>(memory)] = Block{whole, current_stream(device)};
    return {memory, memory, &release, on};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override {
    const auto stream = current_stream(device_of_thread);
    Access access;
    access.add(from, false, stream);
    access.add(to, true, stream);
    memcpy(to, from, count);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

struct Event {
  Clock clock;
  Operations operations;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  static int index(Device device) { return device.index() < 0 ? device_of_thread : device.index(); }
  static StreamKey key(const Stream& stream) { return key_of(stream.device_index(), stream.id()); }

  c10::DeviceType type() const override { return kType; }
  Device getDevice() const override { return Device(kType, device_of_thread); }
  void setDevice(Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { device_of_thread = device.index(); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    set_device(device.index());
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return count_devices(); }

  Stream getStream(Device device) const override { return stream_of(current_stream(index(device))); }
  Stream getDefaultStream(Device device) const override { return stream_of(key_of(index(device), 0)); }
  Stream getNewStream(Device device, int) const override {
    open_context(index(device));
    return stream_of(key_of(index(device), new_stream()));
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    stream_of_thread[stream.device_index()] = stream.id();
    return before;
  }

  void record(void** event, const Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    Lock lock;
    if (!*event) *event = new Event;
    join(clocks[key(stream)], host);
    *static_cast<Event*>(*event) = Event{clocks[key(stream)], awaited[key(stream)]};
  }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    Lock lock;
    const auto& recorded = *static_cast<Event*>(event);
    join(clocks[key(stream)], recorded.clock);
    auto& operations = awaited[key(stream)];
    operations.insert(operations.end(), recorded.operations.begin(), recorded.operations.end());
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    const auto& recorded = *static_cast<Event*>(event);
    for (const auto& operation : recorded.operations) {
      operation->await();
      Lock lock;
      join(host, operation->clock());
    }
    Lock lock;
    join(host, recorded.clock);
  }
  bool queryEvent(void* event) const override {
    if (event)
      for (const auto& operation : static_cast<Event*>(event)->operations)
        if (!operation->has_ended()) return false;
    synchronizeEvent(event);
    return true;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const Stream& stream) const override {
    Lock lock;
    for (const auto& operation : awaited[key(stream)])
      if (!operation->has_ended()) return false;
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    settle(key(stream));
    Lock lock;
    join(host, clocks[key(stream)]);
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    open_context(device);
    std::vector<StreamKey> streams;
    {
      Lock lock;
      for (const auto& [stream, clock] : clocks) streams.push_back(stream);
      for (const auto& [stream, operations] : awaited) streams.push_back(stream);
    }
    for (auto stream : streams)
      if (stream / kStreams == device) synchronizeStream(stream_of(stream));
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream&) const override {
    Lock lock;
    if (Block* block = block_of(pointer.get())) block->is_recorded = true;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex device) {
    device_ = c10::Device(kType, device);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return is_available(); }
  void init() const override { initialize(); }
  bool hasPrimaryContext(c10::DeviceIndex device) const override { return contexts.count(device) > 0; }
  c10::DeviceIndex deviceCount() const override { return count_devices(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return device_of_thread; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice(c10::Device(kType, device)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    Lock lock;
    const Block* block = block_of(pointer);
    TORCH_CHECK(block, "this is no memory of a simdev device");
    return c10::Device(kType, block->home / kStreams);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    ++pinned;
    return at::GetAllocator(at::kCPU);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static std::map<int, at::Generator> generators;
    const int index = device < 0 ? device_of_thread : device;
    return generators.try_emplace(index, at::make_generator<Generator>(index)).first->second;
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? device_of_thread : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto data = allocator.allocate(size);
    if (const size_t kept = std::min(size, impl->nbytes())) allocator.copy_data(data.get(), impl->data(), kept);
    impl->set_data_ptr(std::move(data));
    impl->set_nbytes(size);
  }
};

// Kernels.

using at::Tensor;
using Sizes = c10::SymIntArrayRef;

bool is_on_device(const Tensor& tensor) { return tensor.device().type() == kType; }

// The tensor as a kernel sees it: its memory, as that of the CPU.
Tensor on_cpu(const Tensor& tensor) {
  if (!is_on_device(tensor)) return tensor;
  const auto options = tensor.options().device(at::kCPU);
  auto view = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, options);
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  c10::impl::ExcludeDispatchKeyGuard without_autograd(c10::autograd_dispatch_keyset);
  if (!self.numel()) return to;
  const int device = is_on_device(self) ? self.device().index() : to.device().index();
  open_context(device);
  const auto stream = current_stream(device);
  const bool is_between = is_on_device(self) && is_on_device(to) && self.device() != to.device();
  const auto other = is_between ? current_stream(to.device().index()) : stream;
  settle(stream);
  settle(other);
  Access access;
  join(clocks[stream], clocks[other]);  // a copy between two devices is in order with both
  if (is_on_device(self)) access.add(self, false, stream);
  if (is_on_device(to)) access.add(to, true, stream);
  on_cpu(to).copy_(on_cpu(self));
  join(clocks[other], clocks[stream]);
  if (!in_kernel && !non_blocking && (self.is_cpu() || to.is_cpu())) join(host, clocks[stream]);
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (self.sizes() != to.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::ScalarType supported(std::optional<at::ScalarType> type) {
  const auto wanted = c10::dtype_or_default(type);
  TORCH_CHECK_TYPE(!flag("SIMDEV_NO_FLOAT64") || wanted != at::kDouble, "simdev has no float64");
  return wanted;
}

Tensor empty(Sizes size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), supported(type), format);
}

Tensor empty_strided(Sizes size, Sizes stride, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                     std::optional<c10::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), supported(type));
}

Tensor as_strided(const Tensor& self, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) {
  const auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor view(const Tensor& self, Sizes size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor reshape_alias(const Tensor& self, Sizes size, Sizes stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize(const Tensor& self, Sizes size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t needed = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  if (needed > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  if (format && *format != at::MemoryFormat::Contiguous && *format != at::MemoryFormat::Preserve)
    impl->empty_tensor_restride(*format);
  return self;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  c10::impl::ExcludeDispatchKeyGuard without_autograd(c10::autograd_dispatch_keyset);
  const auto stream = current_stream(self.device().index());
  settle(stream);
  Access access;
  access.add(self, false, stream);
  join(host, clocks[stream]);
  return on_cpu(self).item();
}

Tensor& set_storage_offset(Tensor& self, at::Storage source, c10::SymInt offset, Sizes size, Sizes stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  impl->set_storage_offset(offset.expect_int());
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const int64_t length = source.nbytes() / self.dtype().itemsize();
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({length});
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor& set_empty(Tensor& self) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous({0});
  return self;
}

void record_stream(Tensor& tensor, c10::Stream) { record_use(tensor); }

void run_on_cpu(const c10::OperatorHandle& kernel, torch::jit::Stack* stack) {
  struct Scope {
    bool before = std::exchange(in_kernel, true);
    ~Scope() { in_kernel = before; }
  } scope;
  at::native::cpu_fallback(kernel, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("resize_", resize);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("set_", set_empty);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
}

}  // namespace

bool flag(const char* name) {
  const char* value = getenv(name);
  return value && *value;
}

void log(const std::string& text) {
  const char* path = getenv("SIMDEV_LOG");
  if (!path) return;
  if (FILE* file = fopen(path, "a")) {
    const char* rank = getenv("RANK");
    fprintf(file, "process %d, rank %s: %s\n", getpid(), rank ? rank : "-", text.c_str());
    fclose(file);
  }
}

void join(Clock& into, const Clock& from) {
  for (const auto& [stream, time] : from) into[stream] = std::max(into[stream], time);
}

StreamKey key_of(int device, int64_t stream) { return device * kStreams + stream; }

StreamKey current_stream(int device) {
  const auto found = stream_of_thread.find(device);
  return key_of(device, found == stream_of_thread.end() ? 0 : found->second);
}

c10::Stream stream_of(StreamKey key) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, key / kStreams), key % kStreams);
}

int64_t new_stream() {
  Lock lock;
  return num_streams++;
}

int physical(int device) { return visible.at(device); }

void open_context(int device) {
  initialize();
  Lock lock;
  TORCH_CHECK(device >= 0 && device < static_cast<int>(visible.size()), "simdev: invalid device ordinal ", device);
  if (contexts.insert(device).second) log("context on device " + std::to_string(physical(device)));
}

void set_device(int device) {
  if (device == device_of_thread) return;
  TORCH_CHECK(device >= 0 && device < count_devices(), "simdev: invalid device ordinal ", device);
  device_of_thread = device;
}

int current_device() { return device_of_thread; }

void Operation::await() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return ended_; });
  TORCH_CHECK(error_.empty(), error_);
}

bool Operation::has_ended() {
  std::unique_lock<std::mutex> lock(mutex_);
  return ended_;
}

void Operation::end(const std::string& error, const Clock& clock) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (ended_) return;
  ended_ = true;
  error_ = error;
  clock_ = clock;
  changed_.notify_all();
}

void settle(StreamKey stream) {
  Operations operations;
  {
    Lock lock;
    operations = awaited[stream];
  }
  for (const auto& operation : operations) {
    operation->await();
    Lock lock;
    join(clocks[stream], operation->clock());
  }
  Lock lock;
  for (const auto& operation : operations) std::erase(awaited[stream], operation);
}

void record_use(const at::Tensor& tensor) {
  Lock lock;
  if (Block* block = block_of(tensor.storage().data())) block->is_recorded = true;
}

void copy_in_stream(const at::Tensor& from, const at::Tensor& to) {
  const bool before = std::exchange(in_kernel, true);
  copy_from(from, to, true);
  in_kernel = before;
}

void define_module(pybind11::module& m) {
  static auto* hooks = new Hooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
  pthread_atfork(nullptr, nullptr, after_fork);
  m.def("device_count", &count_devices);
  m.def("is_available", &is_available);
  m.def("init", &initialize);
  m.def("is_initialized", [] { return initialized && !forked; });
  m.def("is_in_bad_fork", [] { return forked; });
  m.def("races", [] { return races; });
  m.def("pinned", [] { return pinned; });
  m.def("contexts", [] { return std::vector<int>(contexts.begin(), contexts.end()); });
  m.def("uuid", [](int device) {
    count_devices();
    return "simdev-" + std::to_string(physical(device));
  });
  m.def("current_device", &current_device);
  m.def("set_device", &set_device);
  m.def("manual_seed", [](int device, uint64_t seed) {
    at::Generator generator = at::detail::getPrivateUse1Hooks().getDefaultGenerator(device);
    generator.set_current_seed(seed);
  });
}

}  // namespace simdev
