// "simccl", a backend of torch.distributed for the simulated device: data moves by gloo, with the limits of NCCL.
//
// Each communicator has one device, one stream, and a thread that runs its operations one after the other. `wait()` lets
// the current stream wait for an operation. With SIMDEV_ASYNC=1 the host goes on, as with NCCL, and blocks at the next
// kernel of that stream: an operation that another rank does not answer stays in the queue, until the communicator is
// aborted or, with SIMDEV_WATCHDOG=SECONDS, a watchdog ends the process.
#include "simulation.h"

#include <ATen/core/ivalue_inl.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

#include <cstdio>
#include <deque>
#include <functional>
#include <set>
#include <thread>

namespace simdev {
namespace {

using namespace c10d;
using at::Tensor;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<Work>;

// What a thread of a communicator runs for an operation, with the stream of the communicator as the current one.
using Task = std::function<void()>;

struct SimWork final : Work {
  SimWork(int rank, OpType type, std::shared_ptr<Operation> operation, Tensors outputs)
      : Work(rank, type), operation(std::move(operation)), outputs(std::move(outputs)) {}
  bool isCompleted() override { return operation->has_ended(); }
  bool isSuccess() const override { return true; }
  void synchronize() override { wait(); }
  bool wait(std::chrono::milliseconds = kNoTimeout) override {
    const auto stream = current_stream(static_cast<int>(operation->stream / kStreams));
    {
      Lock lock;
      awaited[stream].push_back(operation);
    }
    if (!flag("SIMDEV_ASYNC")) settle(stream);
    return true;
  }
  std::vector<Tensor> result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait();
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(outputs);
    return future;
  }
  std::shared_ptr<Operation> operation;
  Tensors outputs;
};

// The operations that wait for the thread of a communicator, which may live longer than the communicator.
struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  bool is_closed = false;
  bool is_aborted = false;

  void run() {
    for (;;) {
      Task task;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return !tasks.empty() || is_closed; });
        if (tasks.empty()) return;
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      task();
    }
  }
  void add(Task task) {
    std::unique_lock<std::mutex> lock(mutex);
    tasks.push_back(std::move(task));
    changed.notify_all();
  }
  // An operation has failed in gloo. With NCCL the other ranks would not answer: it waits for ever.
  void stay(const std::string& error, int rank) {
    log("an operation is not answered: " + error.substr(0, 160));
    std::unique_lock<std::mutex> lock(mutex);
    const auto aborted = [this] { return is_aborted; };
    const char* watchdog = getenv("SIMDEV_WATCHDOG");
    if (!watchdog) return changed.wait(lock, aborted);
    if (changed.wait_for(lock, std::chrono::seconds(atoi(watchdog)), aborted)) return;
    fprintf(stderr, "[rank %d] simccl: the watchdog takes the process down: %.160s\n", rank, error.c_str());
    std::abort();
  }
};

const std::set<at::ScalarType> kTypes{at::kChar, at::kByte,  at::kBool,   at::kInt,     at::kLong,
                                      at::kHalf, at::kFloat, at::kDouble, at::kBFloat16};

class Communicator final : public Backend {
 public:
  Communicator(c10::intrusive_ptr<Backend> gloo, c10::intrusive_ptr<Store> store)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), store_(std::move(store)) {
    log("simccl is made, with the current device " + std::to_string(current_device()));
    std::thread([queue = queue_] { queue->run(); }).detach();
  }
  ~Communicator() override {
    std::unique_lock<std::mutex> lock(queue_->mutex);
    queue_->is_closed = true;
    queue_->changed.notify_all();
  }

  const std::string getBackendName() const override { return "simccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<Options>("simccl"); }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  // As ncclCommSplit, in which all ranks of the parent take part: those of the new group, and those that are not in it.
  void take_part_in_split() {
    const std::string name = "split/" + std::to_string(num_splits_++) + "/";
    store_->set(name + std::to_string(rank_), std::vector<uint8_t>{1});
    for (int other = 0; other < size_; ++other) store_->wait({name + std::to_string(other)});
    log("simccl is split");
  }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void eagerConnectSingleDevice(c10::Device device) override { connect(device.index()); }
  void shutdown() override {
    if (!queue_->is_aborted)
      for (const auto& operation : operations_) operation->await();
    log("simccl is shut down");
  }
  void abort() override {
    log("simccl is aborted");
    {
      std::unique_lock<std::mutex> lock(queue_->mutex);
      queue_->is_aborted = true;
      queue_->changed.notify_all();
    }
    gloo_->abort();
    for (const auto& operation : operations_) operation->end("simccl: the communicator was aborted", {});
  }

  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& options) override {
    const Tensor tensor = checked(tensors[0]);
    return submit(OpType::BROADCAST, {}, {tensor}, [=, this] {
      Tensors on_host{down(tensor)};
      gloo_->broadcast(on_host, options)->wait();
      if (options.rootRank != rank_) copy_in_stream(on_host[0], tensor);
    });
  }
  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& options) override {
    const Tensor tensor = checked(tensors[0], &options.reduceOp);
    return submit(OpType::ALLREDUCE, {}, {tensor}, [=, this] {
      const Tensor on_host = down(tensor);
      reduce(on_host.is_complex() ? at::view_as_real(on_host) : on_host, options.reduceOp);
      copy_in_stream(on_host, tensor);
    });
  }
  WorkPtr allgather(std::vector<Tensors>& outputs, Tensors& inputs, const AllgatherOptions& options) override {
    const Tensor input = checked(inputs[0]);
    const Tensors parts = outputs[0];
    for (const auto& part : parts) checked(part);
    const Tensor flat = flat_copy_of(parts);
    return submit(OpType::ALLGATHER, {input}, parts, [=, this] {
      const Tensor kept = flat;
      Tensors sent{down(input)};
      std::vector<Tensors> received(1);
      for (const auto& part : parts) received[0].push_back(at::empty(part.sizes(), sent[0].options()));
      gloo_->allgather(received, sent, options)->wait();
      for (size_t i = 0; i < parts.size(); ++i) copy_in_stream(received[0][i], parts[i]);
    });
  }
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const AllgatherOptions& options) override {
    const Tensor sent = checked(input).view(-1), received = checked(output);
    return submit(OpType::_ALLGATHER_BASE, {sent}, {received}, [=, this] {
      Tensor from = down(sent), to = at::empty(received.sizes(), from.options());
      gloo_->_allgather_base(to, from, options)->wait();
      copy_in_stream(to, received);
    });
  }
  WorkPtr reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const ReduceScatterOptions& options) override {
    const Tensor output = checked(outputs[0], &options.reduceOp);
    const Tensors parts = inputs[0];
    for (const auto& part : parts) checked(part, &options.reduceOp);
    const Tensor flat = flat_copy_of(parts);
    return submit(OpType::REDUCE_SCATTER, parts, {output}, [=, this] {
      const Tensor kept = flat;
      Tensors on_host;
      for (const auto& part : parts) on_host.push_back(down(part).view(-1));
      const Tensor all = at::stack(on_host);
      reduce(all, options.reduceOp);
      copy_in_stream(all[rank_].view(output.sizes()), output);
    });
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const ReduceScatterOptions& options) override {
    const Tensor scattered = checked(output, &options.reduceOp), all = checked(input, &options.reduceOp);
    return submit(OpType::_REDUCE_SCATTER_BASE, {all}, {scattered}, [=, this] {
      const Tensor on_host = down(all).view({size_, -1});
      reduce(on_host, options.reduceOp);
      copy_in_stream(on_host[rank_].view(scattered.sizes()), scattered);
    });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    const Tensor tensor = checked(tensors[0]);
    return submit(OpType::SEND, {tensor}, {}, [=, this] {
      Tensors on_host{down(tensor)};
      begun_.emplace_back(gloo_->send(on_host, to, tag), [kept = on_host] {});
    });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    const Tensor tensor = checked(tensors[0]);
    return submit(OpType::RECV, {}, {tensor}, [=, this] {
      Tensors on_host{at::empty(tensor.sizes(), tensor.options().device(at::kCPU))};
      auto work = gloo_->recv(on_host, from, tag);
      begun_.emplace_back(std::move(work), [=] { copy_in_stream(on_host[0], tensor); });
    });
  }
  WorkPtr barrier(const BarrierOptions& options) override {
    connect(options.device ? options.device->index() : current_device());
    auto work = submit(OpType::BARRIER, {}, {}, [this] { gloo_->barrier(BarrierOptions())->wait(); });
    work->wait();
    settle(current_stream(device_));
    return work;
  }

  // Operations between two ranks that are coalesced begin together: otherwise two ranks that send first would wait for
  // each other.
  void startCoalescing() override {
    is_coalescing_ = true;
    coalesced_.clear();
    coalesced_tensors_.clear();
  }
  WorkPtr endCoalescing() override {
    is_coalescing_ = false;
    auto tasks = std::move(coalesced_);
    return enqueue(OpType::COALESCED, std::move(coalesced_tensors_), [tasks = std::move(tasks)] {
      for (const auto& task : tasks) task();
    });
  }

 private:
  // A communicator is connected by its first operation, on one device for good.
  void connect(int device) {
    TORCH_CHECK(device_ < 0 || device == device_, "simccl: this communicator is on device ", device_, ", not ", device);
    if (device_ >= 0) return;
    open_context(device);
    const auto own = std::to_string(physical(device));
    store_->set("device/" + std::to_string(rank_), std::vector<uint8_t>(own.begin(), own.end()));
    for (int other = 0; other < size_; ++other) {
      const std::string key = "device/" + std::to_string(other);
      // A wait of the store would keep the threads of other communicators from it.
      while (!store_->check({key})) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const auto theirs = store_->get(key);
      TORCH_CHECK(other == rank_ || std::string(theirs.begin(), theirs.end()) != own,
                  "simccl: Duplicate GPU detected : rank ", rank_, " and rank ", other, " both on device ", own);
    }
    device_ = device;
    stream_ = key_of(device, new_stream());
    log("simccl is connected, on device " + own);
  }

  Tensor checked(const Tensor& tensor, const ReduceOp* op = nullptr) {
    TORCH_CHECK(tensor.device().type() == kType, "No backend type associated with device type ", tensor.device());
    TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
    const bool is_linear = !op || *op == ReduceOp::SUM || *op == ReduceOp::AVG;
    TORCH_CHECK(kTypes.count(tensor.scalar_type()) || (tensor.is_complex() && is_linear),
                "Input tensor data type is not supported for simccl: ", tensor.scalar_type());
    TORCH_CHECK(!op || (*op != ReduceOp::BAND && *op != ReduceOp::BOR && *op != ReduceOp::BXOR),
                "Cannot use a bitwise ReduceOp with simccl");
    TORCH_CHECK(!op || *op != ReduceOp::AVG || tensor.scalar_type() != at::kBool, "Cannot use ReduceOp.AVG with bools");
    connect(tensor.device().index());
    return tensor;
  }

  // The buffer that NCCL needs for a list of tensors.
  Tensor flat_copy_of(const Tensors& parts) {
    int64_t length = 0;
    for (const auto& part : parts) length += part.numel();
    return at::empty({length}, parts[0].options());
  }

  Tensor down(const Tensor& tensor) {
    const Tensor on_host = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
    copy_in_stream(tensor, on_host);
    return on_host;
  }

  void reduce(const Tensor& on_host, const ReduceOp& op) {
    AllreduceOptions options;
    const bool is_mean = op == ReduceOp::AVG;
    options.reduceOp = is_mean ? ReduceOp(ReduceOp::SUM) : op;
    Tensors tensors{on_host};
    gloo_->allreduce(tensors, options)->wait();
    if (!is_mean) return;
    if (on_host.is_floating_point()) on_host.div_(size_);
    else on_host.div_(size_, "trunc");
  }

  WorkPtr submit(OpType type, const Tensors& inputs, const Tensors& outputs, Task task) {
    log(opTypeToString(type) + " is called");
    for (const auto& tensor : inputs) record_use(tensor);
    for (const auto& tensor : outputs) record_use(tensor);
    if (!is_coalescing_) return enqueue(type, outputs, std::move(task));
    coalesced_.push_back(std::move(task));
    coalesced_tensors_.insert(coalesced_tensors_.end(), outputs.begin(), outputs.end());
    return c10::make_intrusive<SimWork>(rank_, type, std::make_shared<Operation>(stream_), outputs);
  }

  WorkPtr enqueue(OpType type, Tensors outputs, Task task) {
    auto operation = std::make_shared<Operation>(stream_);
    operations_.push_back(operation);
    const auto caller = current_stream(device_);
    Operations before;
    Clock clock;
    {
      Lock lock;
      before = awaited[caller];
      clock = clocks[caller];
      join(clock, host);
    }
    c10::intrusive_ptr<Communicator> self = c10::intrusive_ptr<Communicator>::reclaim_copy(this);
    queue_->add([=, task = std::move(task)] { self->run(*operation, before, clock, task); });
    return c10::make_intrusive<SimWork>(rank_, type, operation, std::move(outputs));
  }

  void run(Operation& operation, const Operations& before, const Clock& clock, const Task& task) {
    std::string error;
    try {
      set_device(device_);
      const c10::StreamGuard stream(stream_of(stream_));
      for (const auto& other : before) other->await();
      {
        Lock lock;
        join(clocks[stream_], clock);
        for (const auto& other : before) join(clocks[stream_], other->clock());
      }
      task();
      for (const auto& [work, finish] : begun_) {
        work->wait();
        finish();
      }
    } catch (const std::exception& failure) {
      error = failure.what();
      if (flag("SIMDEV_ASYNC")) queue_->stay(error, rank_);
    }
    begun_.clear();
    Lock lock;
    operation.end(error, clocks[stream_]);
  }

  c10::intrusive_ptr<Backend> gloo_;
  c10::intrusive_ptr<Store> store_;
  std::shared_ptr<Queue> queue_ = std::make_shared<Queue>();
  Operations operations_;
  int device_ = -1;
  StreamKey stream_ = 0;
  int num_splits_ = 0;
  bool is_coalescing_ = false;
  std::vector<Task> coalesced_;
  Tensors coalesced_tensors_;
  // Transfers that the running operation has begun, and what follows when they are over.
  std::vector<std::pair<WorkPtr, Task>> begun_;
};

}  // namespace

void define_module(pybind11::module& m);

}  // namespace simdev

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using simdev::Communicator;
  simdev::define_module(m);
  py::class_<Communicator, c10::intrusive_ptr<Communicator>, c10d::Backend>(m, "Communicator")
      .def(
          "perform_nocolor_split", [](Communicator& self, c10::Device) { self.take_part_in_split(); },
          py::call_guard<py::gil_scoped_release>());
  m.def(
      "make_backend",
      [](const c10::intrusive_ptr<c10d::Backend>& gloo, const c10::intrusive_ptr<c10d::Store>& store)
          -> c10::intrusive_ptr<c10d::Backend> { return c10::make_intrusive<Communicator>(gloo, store); },
      py::call_guard<py::gil_scoped_release>());
}
