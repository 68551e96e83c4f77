#include "graphs.h"

#include "driver.h"
#include "generator.h"
#include "memory.h"
#include <c10/core/TensorImpl.h>

#include <cstring>
#include <memory>
#include <set>
#include <string>

namespace emulated {
namespace {

struct Graph {
  void* stream = nullptr;      // on which it is captured
  void* executable = nullptr;  // the driver's
  Pool* pool = nullptr;
  std::shared_ptr<const Snapshot> before;
  uint64_t drawn = 0;

  ~Graph() {
    if (executable != nullptr) driver()->destroy_executable(executable);
    if (pool == nullptr) return;
    end_pool(pool);
    drop_pool(pool);
  }
};

thread_local Graph* recording = nullptr;

void call(void* work) { (*static_cast<std::function<void()>*>(work))(); }
void drop(void* work) { delete static_cast<std::function<void()>*>(work); }

// As a host function of the stream.
void queue(void* stream, std::function<void()> work) {
  struct Once {
    std::function<void()> work;
    static void run(void* once) { std::unique_ptr<Once>(static_cast<Once*>(once))->work(); }
  };
  check(driver()->launch_host(stream, &Once::run, new Once{std::move(work)}));
}

void begin(Graph& graph, int mode) {
  TORCH_CHECK(driver() != nullptr, "emulated device: graphs need the emulated driver");
  TORCH_CHECK(recording == nullptr, "emulated device: one capture at a time");
  graph.stream = current_stream();
  TORCH_CHECK(graph.stream != nullptr,
              "CUDA graphs must be captured on a non-default stream. (However, after capture, it's "
              "ok to replay them on the default stream.)");
  check(driver()->context_synchronize());
  graph.before = take_snapshot();
  check(driver()->begin_capture(graph.stream, mode));
  begin_captured_draws();
  graph.pool = begin_pool();
  recording = &graph;
}

void undo(Graph& graph) {
  restore(*graph.before);
  graph.before.reset();
  poison_pool(graph.pool);
  repair_guards(graph.pool);
}

// If the capture is invalid, PyTorch leaves its allocator and its generator in the capture.
void end(Graph& graph) {
  TORCH_CHECK(current_stream() == graph.stream, "Capture must end on the same stream it began on.");
  driver()->run_stream(graph.stream);
  recording = nullptr;
  void* made = nullptr;
  const int result = driver()->end_capture(graph.stream, &made);
  undo(graph);
  check(result);
  end_pool(graph.pool);
  graph.drawn = end_captured_draws();
  check(driver()->instantiate(&graph.executable, made, 0));
  check(driver()->destroy_graph(made));
}

void replay(Graph& graph) {
  TORCH_CHECK(graph.executable != nullptr,
              "Called CUDAGraph::replay without a preceding successful capture.");
  void* stream = current_stream();
  int status = 0;
  check(driver()->is_capturing(stream, &status));
  if (status == 0) {
    queue(stream, [pool = graph.pool, position = take_draws(graph.drawn)] {
      poison_pool(pool);
      draw_from(position);
    });
  }
  check(driver()->launch_graph(graph.executable, stream));
  queue(stream, [pool = graph.pool] {
    draw_from(std::nullopt);
    repair_guards(pool);
  });
}

// Operators whose results have as many elements as the data says.
bool reads_back(const c10::OperatorHandle& op) {
  static const std::set<std::string> names = {
      "aten::nonzero",    "aten::masked_select",      "aten::_unique2",
      "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave",
      "aten::bincount",   "aten::multinomial"};
  return op.hasTag(at::Tag::data_dependent_output) || names.contains(op.schema().name());
}

template <typename Call>
const char* words(Call call) {
  static thread_local std::string text;
  try {
    call();
    return nullptr;
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  }
  return text.c_str();
}

}  // namespace

bool is_recording() { return recording != nullptr && recording->stream == current_stream(); }

void record(std::function<void()> work) {
  driver()->add_node(recording->stream, &call, new std::function<void()>(std::move(work)), &drop);
}

void check_capture(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t first) {
  bool from_host = false;
  for (size_t i = first; i < stack.size(); ++i) {
    if (!stack[i].isTensor()) continue;
    const at::Tensor& tensor = stack[i].toTensor();
    from_host |= tensor.defined() && tensor.is_cpu() && tensor.dim() > 0;
  }
  const std::string& name = op.schema().name();
  const bool copies = name == "aten::copy_" || name == "aten::_copy_from";
  if (!reads_back(op) && !(from_host && copies)) return;
  driver()->invalidate(recording->stream);
  TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing: ", name);
}

at::Tensor Unowned::of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  const c10::Storage& owner = tensor.storage();
  auto found = storages_.find(owner.unsafeGetStorageImpl());
  if (found == storages_.end()) {
    void* address = owner.nbytes() == 0 ? nullptr : const_cast<void*>(owner.data());
    const c10::Storage made(c10::Storage::use_byte_size_t(), owner.nbytes(),
                            c10::DataPtr(address, owner.device()), &allocator(),
                            /*resizable=*/true);
    found = storages_.emplace(owner.unsafeGetStorageImpl(), made).first;
  }
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(found->second),
                                                             tensor.key_set(), tensor.dtype());
  c10::TensorImpl* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(tensor.storage_offset());
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

bool Unowned::has(const at::Tensor& tensor) const {
  return storages_.contains(tensor.storage().unsafeGetStorageImpl());
}

void copy_bytes(const at::Tensor& from, const at::Tensor& to) {
  TORCH_CHECK(from.strides() == to.strides() && from.sizes() == to.sizes(),
              "emulated device: a replay gives another form than the capture");
  const size_t bytes = to.storage().nbytes();
  TORCH_CHECK(bytes == from.storage().nbytes(), "emulated device: a replay gives other sizes");
  if (bytes > 0)
    std::memcpy(host_view(to.storage().data()), host_view(from.storage().data()), bytes);
}

}  // namespace emulated

#define EMULATED_EXPORT extern "C" __attribute__((visibility("default")))

using emulated::Graph;

EMULATED_EXPORT void* emulated_graph_new() { return new Graph; }
EMULATED_EXPORT void emulated_graph_free(void* graph) {
  if (emulated::driver() != nullptr) emulated::driver()->context_synchronize();
  delete static_cast<Graph*>(graph);
}
// Each gives the words of an error, or null.
EMULATED_EXPORT const char* emulated_graph_begin(void* graph, int mode) {
  return emulated::words([&] { emulated::begin(*static_cast<Graph*>(graph), mode); });
}
EMULATED_EXPORT const char* emulated_graph_end(void* graph) {
  return emulated::words([&] { emulated::end(*static_cast<Graph*>(graph)); });
}
EMULATED_EXPORT const char* emulated_graph_replay(void* graph) {
  return emulated::words([&] { emulated::replay(*static_cast<Graph*>(graph)); });
}
EMULATED_EXPORT void emulated_graph_end_pool(void* graph) {
  emulated::end_pool(static_cast<Graph*>(graph)->pool);
}
EMULATED_EXPORT int emulated_is_capturing() {
  int status = 0;
  if (emulated::driver() != nullptr) {
    emulated::driver()->is_capturing(emulated::current_stream(), &status);
  }
  return status;
}
