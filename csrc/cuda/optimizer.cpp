#include "cuda/optimizer.h"

#include "base/error.h"
#include "cuda/build.h"
#include "cuda/device_words.h"
#include "cuda/driver.h"
#include "cuda/optimizer_text.h"
#include "cuda/settings.h"
#include "cuda/stream.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

namespace torch_ort::cuda {

namespace {

using ir::DType;

// Numbers and structs that optimizer.cuh has too.
constexpr int64_t kChunk = 8192;
constexpr uint32_t kThreads = 256, kMostSettings = 32;
constexpr uint32_t kSharedBytes = kThreads / 32 * sizeof(double);
constexpr uint32_t kAligned = 1, kFirstStep = 2;

struct TensorWords {
  std::array<const void*, 5> at = {};
  int64_t count = 0;
  uint32_t slot = 0, flags = 0;
};
struct SlotWords {
  const void* taken = nullptr;
  uint32_t settings = 0, taken_is_double = 0;
};
struct SettingsWords {
  double lr, beta1, beta2, eps, weight_decay, momentum, dampening, ratio_min, ratio_max, taken;
  const void* lr_at;
  uint32_t flags, unused;
};
struct GradientWords {
  double scale, max_norm;
  const void *scale_at, *found_inf;
  const double* sums;
  int64_t num_sums;
  void *norm, *skipped;
};
constexpr int64_t kStepBytes = 8, kRuleBytes = 15 * (8 + 4) + 4 + 2 * 8;
static_assert(sizeof(TensorWords) == 56 && sizeof(SlotWords) == 16 && sizeof(SettingsWords) == 96);

SettingsWords words_of(const StepSettings& of) {
  using Decay = StepSettings::Decay;
  const std::pair<bool, uint32_t> flags[] = {
      {of.lr_is_double, 1},
      {of.corrects, 2},
      {of.plain_root, 4},
      {of.decay == Decay::kBefore, 8},
      {of.decay == Decay::kAfter, 16},
      {of.maximize, 32},
      {of.nesterov, 64},
  };
  SettingsWords words = {of.lr,
                         of.beta1,
                         of.beta2,
                         of.eps,
                         of.weight_decay,
                         of.momentum,
                         of.dampening,
                         of.ratio_min,
                         of.ratio_max,
                         of.taken,
                         of.lr_at,
                         0,
                         0};
  for (const auto& [is_set, flag] : flags) words.flags |= is_set ? flag : 0;
  return words;
}

// --- kernels -------------------------------------------------------------------------------------

// The modules of each device. A text is written when it is first needed.
class Kernels {
 public:
  template <typename Write>
  const Module& get(int device, const std::string& key, const Write& write) {
    const std::lock_guard lock(mutex_);
    std::shared_ptr<const Module>& module = modules_[{device, key}];
    if (module == nullptr) {
      const OptimizerText made = write();
      module = build(made.name, made.text, {.dump_dir = settings().dump_dir}, device);
    }
    return *module;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, std::string>, std::shared_ptr<const Module>> modules_;
};

// Never destroyed, because threads that compile may outlive it.
Kernels& kernels() {
  static auto* each = new Kernels;
  return *each;
}

const Module& begin_module(int device) {
  return kernels().get(device, "begin", [] { return begin_text(); });
}

const Module& squares_module(int device, DType gradient) {
  return kernels().get(device, concat("squares ", ir::name(gradient)),
                       [=] { return squares_text(gradient); });
}

const Module& update_module(int device, OptimizerRule rule, const std::vector<DType>& dtypes) {
  std::string key = concat("update ", static_cast<int>(rule));
  for (DType dtype : dtypes) key += concat(" ", static_cast<int>(dtype));
  return kernels().get(device, key, [&] { return update_text(rule, dtypes); });
}

// --- the table -----------------------------------------------------------------------------------

// Tensors of equal dtypes, which one kernel updates.
struct Batch {
  std::vector<DType> dtypes;
  std::vector<TensorWords> tensors;
  std::vector<uint32_t> ends;  // for each tensor, the number of chunks up to its end
  const Function *update = nullptr, *move = nullptr, *squares = nullptr;
  // Offsets in the table, and the first chunk and tensor among those of all batches.
  size_t tensors_at = 0, ends_at = 0;
  int64_t first_chunk = 0, first_tensor = 0;

  uint32_t num_chunks() const { return ends.back(); }
};

bool is_aligned(const SteppedTensor& tensor) {
  return std::all_of(tensor.arrays.begin(), tensor.arrays.begin() + tensor.num_arrays,
                     [](const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; });
}

void add(Batch& batch, const SteppedTensor& tensor) {
  TensorWords words{.count = tensor.count, .slot = tensor.slot};
  std::copy(tensor.arrays.begin(), tensor.arrays.end(), words.at.begin());
  words.flags = (is_aligned(tensor) ? kAligned : 0) | (tensor.is_first ? kFirstStep : 0);
  batch.tensors.push_back(words);
  const int64_t before = batch.ends.empty() ? 0 : batch.ends.back();
  const int64_t end = before + (tensor.count + kChunk - 1) / kChunk;
  if (end > std::numeric_limits<int32_t>::max()) {
    throw Unsupported(concat("optimizer step: blocks of a launch: got ", end, ", want at most ",
                             std::numeric_limits<int32_t>::max()));
  }
  batch.ends.push_back(static_cast<uint32_t>(end));
}

std::vector<Batch> batches_of(const std::vector<SteppedTensor>& tensors) {
  std::vector<Batch> batches;
  for (const SteppedTensor& tensor : tensors) {
    if (tensor.count == 0) continue;
    const std::vector<DType> dtypes(tensor.dtypes.begin(),
                                    tensor.dtypes.begin() + tensor.num_arrays);
    auto batch = std::find_if(batches.begin(), batches.end(),
                              [&](const Batch& each) { return each.dtypes == dtypes; });
    if (batch == batches.end()) batch = batches.insert(batch, Batch{.dtypes = dtypes});
    add(*batch, tensor);
  }
  int64_t chunk = 0, number = 0;
  for (Batch& batch : batches) {
    batch.first_chunk = std::exchange(chunk, chunk + batch.num_chunks());
    batch.first_tensor = std::exchange(number, number + static_cast<int64_t>(batch.tensors.size()));
  }
  return batches;
}

// Appends a list to the words, and returns its offset in words.
template <typename T>
size_t append(std::vector<uint64_t>& words, const std::vector<T>& all) {
  const size_t at = words.size();
  words.resize(at + (all.size() * sizeof(T) + 7) / 8);
  if (!all.empty()) std::memcpy(words.data() + at, all.data(), all.size() * sizeof(T));
  return at;
}

// --- the step ------------------------------------------------------------------------------------

class Stepping {
 public:
  Stepping(const MultiStep& step, int device)
      : step_(step),
        device_(device),
        batches_(batches_of(step.tensors)),
        is_lamb_(step.rule == OptimizerRule::kLamb) {
    find_kernels();
  }

  void run() {
    stream_ = current_stream(device_);
    write_table();
    for (const Batch& batch : batches_) {
      num_chunks_ += batch.num_chunks();
      num_tensors_ += static_cast<int64_t>(batch.tensors.size());
    }
    const int64_t sums = step_.gradients.looks ? num_chunks_ : 0;
    const int64_t norms = is_lamb_ ? 2 * num_chunks_ : 0, rates = is_lamb_ ? num_tensors_ : 0;
    const int64_t rule_bytes = kRuleBytes * static_cast<int64_t>(step_.slots.size());
    const Scratch memory(kStepBytes + rule_bytes + 8 * (sums + norms + rates), device_);
    begun_ = static_cast<char*>(memory.data());
    rules_ = begun_ + kStepBytes;
    sums_ = reinterpret_cast<double*>(rules_ + rule_bytes);
    norms_ = sums_ + sums;
    rates_ = norms_ + norms;
    if (step_.gradients.looks) look();
    begin();
    for (const Batch& batch : batches_) is_lamb_ ? update_by_lamb(batch) : update(batch);
  }

 private:
  // Finds all kernels before the first one is launched. If one cannot be built, the whole step is
  // done without them.
  void find_kernels() {
    const Module& module = begin_module(device_);
    for (const Batch& batch : batches_) {
      update_module(device_, step_.rule, batch.dtypes);
      if (step_.gradients.looks) squares_module(device_, batch.dtypes[1]);
    }
    for (Batch& batch : batches_) {
      const Module& updates = update_module(device_, step_.rule, batch.dtypes);
      const std::string name = updates.image().source().name;
      batch.update = &updates.function(name);
      if (is_lamb_) batch.move = &updates.function(name + "_move");
      if (!step_.gradients.looks) continue;
      const Module& squares = squares_module(device_, batch.dtypes[1]);
      batch.squares = &squares.function(squares.image().source().name);
    }
    begin_ = &module.function("begin_step");
    write_ = &module.function("write_words");
    lamb_rates_ = &module.function("lamb_rates");
  }

  void write_table() {
    std::vector<SlotWords> slots;
    for (const StepSlot& slot : step_.slots) {
      slots.push_back({slot.taken_at, slot.settings, slot.taken_is_double ? 1u : 0u});
    }
    std::vector<uint64_t> words;
    append(words, slots);
    for (Batch& batch : batches_) {
      batch.tensors_at = append(words, batch.tensors);
      batch.ends_at = append(words, batch.ends);
    }
    table_ = words_on_device(words, *write_, stream_);
  }

  const uint64_t* table(size_t at) const {
    return static_cast<const uint64_t*>(table_->data()) + at;
  }

  // `given` are the values of the kernel's parameters, in order.
  template <typename... Given>
  void launch(const Function& kernel, int64_t blocks, Given... given) const {
    const Launch launch{.grid = {static_cast<uint32_t>(blocks)},
                        .block = {kThreads},
                        .shared_bytes = kSharedBytes,
                        .stream = stream_};
    Driver::get().start(kernel, launch, given...);
  }
  template <typename... Given>
  void launch_on_chunks(const Function& kernel, const Batch& batch, Given... given) const {
    launch(kernel, batch.num_chunks(), table(batch.ends_at), table(batch.tensors_at),
           static_cast<int>(batch.tensors.size()), given...);
  }

  void look() const {
    for (const Batch& batch : batches_) {
      launch_on_chunks(*batch.squares, batch, sums_ + batch.first_chunk);
    }
  }

  // Settings are parameters of the kernel, so many of them need several launches. Each launch
  // handles the slots that have its settings.
  void begin() const {
    struct List {
      SettingsWords at[kMostSettings];
    };
    const GradientUse& use = step_.gradients;
    const GradientWords gradients = {
        use.scale,   use.max_norm, use.scale_at, use.found_inf, use.looks ? sums_ : nullptr,
        num_chunks_, use.norm,     use.skipped};
    size_t first = 0, slot = 0;
    do {
      const size_t last = std::min<size_t>(first + kMostSettings, step_.settings.size());
      List list = {};
      for (size_t i = first; i < last; ++i) list.at[i - first] = words_of(step_.settings[i]);
      size_t end = slot;
      while (end < step_.slots.size() && step_.slots[end].settings < last) ++end;
      launch(*begin_, 1, begun_, rules_, table(0), static_cast<int>(slot), static_cast<int>(end),
             static_cast<int>(first), gradients, list);
      first = last;
      slot = end;
    } while (first < step_.settings.size());
  }

  void update(const Batch& batch) const { launch_on_chunks(*batch.update, batch, begun_, rules_); }

  void update_by_lamb(const Batch& batch) const {
    double* const norms = norms_ + 2 * batch.first_chunk;
    double* const rates = rates_ + batch.first_tensor;
    launch_on_chunks(*batch.update, batch, begun_, rules_, norms);
    launch(*lamb_rates_, static_cast<int64_t>(batch.tensors.size()), table(batch.ends_at),
           table(batch.tensors_at), begun_, rules_, norms, rates);
    launch_on_chunks(*batch.move, batch, begun_, rules_, rates);
  }

  const MultiStep& step_;
  int device_;
  std::vector<Batch> batches_;
  bool is_lamb_;
  const Function *begin_ = nullptr, *write_ = nullptr, *lamb_rates_ = nullptr;
  void* stream_ = nullptr;
  std::shared_ptr<const Scratch> table_;
  int64_t num_chunks_ = 0, num_tensors_ = 0;
  char *begun_ = nullptr, *rules_ = nullptr;  // a Step, and a Rule for each slot
  double *sums_ = nullptr, *norms_ = nullptr, *rates_ = nullptr;
};

}  // namespace

void prepare(const MultiStep& step, int device) { Stepping(step, device); }
void run(const MultiStep& step, int device) { Stepping(step, device).run(); }

std::vector<std::pair<std::string, std::string>> optimizer_texts(
    OptimizerRule rule, const std::vector<ir::DType>& dtypes) {
  std::vector<std::pair<std::string, std::string>> texts;
  for (const OptimizerText& each :
       {begin_text(), squares_text(dtypes[1]), update_text(rule, dtypes)}) {
    texts.emplace_back(each.name, each.text);
  }
  return texts;
}

}  // namespace torch_ort::cuda
