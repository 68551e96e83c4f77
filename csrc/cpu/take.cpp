// Places along one dim: what lies there is taken out of a tensor, or added up in zeros of its
// sizes.
//
// PyTorch's index computes an offset for every element, and its gradient adds one element at a
// time, on one thread or in an order that varies. Here contiguous runs are copied, and each thread
// sums a part of the result, in the order of the places.
#include "base/error.h"
#include "base/rounding.h"
#include "cpu/parallel.h"
#include "cpu/program.h"
#include "cpu/thread_memory.h"
#include "region/paired_axes.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <type_traits>

namespace torch_ort::cpu {

namespace {

using ir::DType;

constexpr int64_t kWorkPerThread = 1 << 15;  // in elements
constexpr int64_t kBlock = 512;              // in places
constexpr int64_t kSums = 1 << 16;           // so many stay in the second-level cache
constexpr int64_t kLine = 16;                // numbers in a cache line

using Axis = region::PairedAxis;
using Offsets = region::PairedOffsets;

// Some places in a row: their distances along the dim, and the offsets of their parts, both in
// elements.
struct Block {
  int64_t first = -1, count = 0;
  int64_t along[kBlock], part[kBlock];
};

// How elements are addressed. `whole` has the indexed dim, and `parts` has what is at the places
// along it.
class Taking {
 public:
  // `written`, which is one of the two, decides which dims are the outer ones.
  Taking(const ir::Node& node, const Layout& whole, const Layout& places, const Layout& parts,
         const Layout& written)
      : counts_from_end_(ir::int_attr(node.attrs, "from_end", 0) != 0),
        is_gradient_(&written == &whole),
        dim_(ir::int_attr(node.attrs, "axis", 0)),
        rank_(static_cast<int64_t>(whole.sizes.size())) {
    const std::string& op = node.op.name;
    ORT_CHECK(dim_ >= 0 && dim_ < rank_, op, ": got axis ", dim_, " of ", rank_, " dims");
    const int64_t behind = dim_ + static_cast<int64_t>(places.sizes.size());
    std::vector<int64_t> sizes = whole.sizes;
    sizes.erase(sizes.begin() + dim_);
    sizes.insert(sizes.begin() + dim_, places.sizes.begin(), places.sizes.end());
    ORT_CHECK(parts.sizes == sizes && parts.dtype == whole.dtype, op,
              ": the operands do not fit together");
    ORT_CHECK(places.dtype == DType::kInt64 || places.dtype == DType::kInt32, op,
              ": dtype of the places: got ", ir::name(places.dtype), ", want int64 or int32");
    is_short_ = places.dtype == DType::kInt32;
    size = whole.sizes[dim_];
    stride = whole.strides[dim_];

    std::vector<Axis> of_places, others;
    for (int64_t i = dim_; i < behind; ++i) {
      of_places.push_back({parts.sizes[i], places.strides[i - dim_], parts.strides[i]});
      num_places *= parts.sizes[i];
    }
    places_ = region::merge(of_places);
    for (int64_t i = 0; i < rank_; ++i) {
      const int64_t of_parts = i < dim_ ? i : i - dim_ - 1 + behind;
      if (i != dim_) others.push_back({whole.sizes[i], whole.strides[i], parts.strides[of_parts]});
    }
    const auto is_further_out = [this](const Axis& x, const Axis& y) {
      return is_gradient_ ? x.a > y.a : x.b > y.b;
    };
    std::stable_sort(others.begin(), others.end(), is_further_out);
    outer_ = region::merge(others);
    const Axis along = {size, stride, places_.empty() ? 0 : places_.back().b};
    if (!outer_.empty() && (places_.empty() || is_further_out(along, outer_.back()))) {
      inner = outer_.back();
      outer_.pop_back();
    }
    for (const Axis& axis : outer_) num_outer *= axis.size;
  }

  int64_t size = 0, stride = 0;  // of the indexed dim
  int64_t num_places = 1, num_outer = 1;
  Axis inner{1, 1, 1};  // the innermost dim of what is written

  Offsets outer(int64_t number) const { return region::offsets_of(outer_, number); }

  // The distance from a part to the next if all distances are equal, else -1.
  int64_t part_stride() const {
    if (places_.size() > 1) return -1;
    return places_.empty() ? 1 : places_[0].b;
  }

  // Reads places as multiples of `unit`. Negative ones become places from the beginning.
  void load(const void* places, int64_t first, int64_t count, int64_t unit, Block& block) const {
    if (block.first == first && block.count == count) return;
    block.first = first;
    block.count = count;
    if (is_short_) {
      load_as<int32_t>(places, unit, block);
    } else {
      load_as<int64_t>(places, unit, block);
    }
  }

  // Raises what eager PyTorch raises for the first place that does not exist.
  void check(const void* places) const {
    if (num_places == 0) return;
    const bool is_empty = num_outer * inner.size == 0;
    if (counts_from_end_ || is_gradient_) {
      TORCH_CHECK_INDEX(size > 0, "index is out of bounds for dimension with size 0");
      if (is_empty) return;
    } else if (rank_ > 1) {
      TORCH_CHECK(size > 0, "index_select(): self indexing axis dim should be positive");
    }
    if (is_short_) {
      check_as<int32_t>(places, is_empty);
    } else {
      check_as<int64_t>(places, is_empty);
    }
  }

  std::string str() const {
    return concat(num_places, " places of ", size, ", ", num_outer, " times ", inner.size, "\n");
  }

 private:
  // Visits each place with the offset of its part.
  template <typename Id, typename Visit>
  void for_each(const void* places, int64_t first, int64_t count, Visit visit) const {
    const auto* ids = static_cast<const Id*>(places);
    if (places_.size() == 1) {
      const auto [unused, stride, part_stride] = places_[0];
      for (int64_t i = first; i < first + count; ++i) visit(ids[i * stride], i * part_stride);
      return;
    }
    for (int64_t i = first; i < first + count; ++i) {
      const Offsets at = region::offsets_of(places_, i);
      visit(ids[at.a], at.b);
    }
  }

  template <typename Id>
  void load_as(const void* places, int64_t unit, Block& block) const {
    int64_t i = 0;
    for_each<Id>(places, block.first, block.count, [&](int64_t id, int64_t part) {
      block.along[i] = (id < 0 ? id + size : id) * unit;
      block.part[i++] = part;
    });
  }

  template <typename Id>
  void check_as(const void* places, bool is_empty) const {
    const int64_t least = counts_from_end_ ? -size : 0;
    for_each<Id>(places, 0, num_places, [&](int64_t id, int64_t) {
      if (id < least || id >= size) refuse(id, is_empty);
    });
  }

  [[noreturn]] void refuse(int64_t id, bool is_empty) const {
    TORCH_CHECK_INDEX(!counts_from_end_, "index ", id,
                      " is out of bounds for dimension 0 with size ", size);
    TORCH_CHECK(!is_gradient_, "index ", id, " is out of bounds for dimension ", dim_,
                " with size ", size);
    // PyTorch has kernels of their own for the second dim and for empty tensors, which raise
    // another error.
    TORCH_CHECK_INDEX(rank_ > 1 && (dim_ == 1 || is_empty), "index out of range in self");
    TORCH_CHECK(false, "INDICES element is out of DATA bounds, id=", id, " axis_dim=", size);
  }

  bool counts_from_end_, is_gradient_, is_short_ = false;
  int64_t dim_, rank_;
  std::vector<Axis> outer_;   // a: of the whole, b: of the parts
  std::vector<Axis> places_;  // a: of the places, b: of the parts
};

// `T` is an integer that stands for all types of its size.
template <typename T>
class Take final : public Kernel {
 public:
  explicit Take(Taking taking) : taking_(std::move(taking)) {}

  void run(const void* const* inputs, void* const* outputs) const override {
    const auto* whole = static_cast<const T*>(inputs[0]);
    const void* places = inputs[1];
    auto* parts = static_cast<T*>(outputs[0]);
    taking_.check(places);
    const int64_t width = taking_.inner.size, count = taking_.num_places;
    if (width * count * taking_.num_outer == 0) return;
    const int64_t step = std::clamp<int64_t>(kWorkPerThread / width, 1, std::min(kBlock, count));
    const int64_t grain = std::max<int64_t>(1, kWorkPerThread / (step * width));
    const int64_t num_outer = taking_.num_outer;
    parallel_for(0, ceil_div(count, step) * num_outer, grain, [&](int64_t begin, int64_t end) {
      Block block;
      while (begin < end) {
        const int64_t first = begin / num_outer * step, outer = begin % num_outer;
        const int64_t last = std::min(num_outer, outer + end - begin);
        taking_.load(places, first, std::min(step, count - first), taking_.stride, block);
        for (int64_t i = outer; i < last; ++i) {
          const Offsets at = taking_.outer(i);
          copy(whole + at.a, parts + at.b, block);
        }
        begin += last - outer;
      }
    });
  }

  std::string str() const override { return concat("take ", taking_.str()); }

 private:
  void copy(const T* whole, T* parts, const Block& block) const {
    const auto [width, from, to] = taking_.inner;
    if (width == 1 && taking_.part_stride() == 1) {
      T* target = parts + block.first;
      for (int64_t i = 0; i < block.count; ++i) target[i] = whole[block.along[i]];
      return;
    }
    for (int64_t i = 0; i < block.count; ++i) {
      const T* source = whole + block.along[i];
      T* target = parts + block.part[i];
      if (width == 1) {
        *target = *source;
      } else if (from == 1 && to == 1) {
        std::copy_n(source, width, target);
      } else {
        for (int64_t j = 0; j < width; ++j) target[j * to] = source[j * from];
      }
    }
  }

  const Taking taking_;
};

// Each element is summed in the order of the places, whatever the number of threads. Short floats
// are summed in float32.
template <typename T>
class TakeGrad final : public Kernel {
  static constexpr bool kIsShort = sizeof(T) == 2;
  using Sum = std::conditional_t<kIsShort, float, T>;

  // A range of the indexed dim, and one of the innermost dim.
  struct Piece {
    int64_t begin, size, first_column, width;
  };
  struct Sums {
    Sum* data;
    int64_t stride, column_stride;
  };

 public:
  TakeGrad(Taking taking, DType dtype, Isa isa)
      : taking_(std::move(taking)),
        kernels_(kernels<Sum>(isa)),
        load_(kernels_.load[static_cast<size_t>(dtype)]),
        store_(kernels_.store[static_cast<size_t>(dtype)]) {}

  void run(const void* const* inputs, void* const* outputs) const override {
    const auto* parts = static_cast<const T*>(inputs[0]);
    const void* places = inputs[1];
    auto* whole = static_cast<T*>(outputs[0]);
    taking_.check(places);
    const int64_t columns = taking_.inner.size, size = taking_.size;
    if (size * columns * taking_.num_outer == 0) return;
    const int64_t work = (taking_.num_places + size) * columns;
    const std::pair<int64_t, int64_t> block_sizes = split(work * taking_.num_outer);
    const int64_t width = block_sizes.first, height = block_sizes.second;
    const int64_t across = ceil_div(columns, width), pieces = across * ceil_div(size, height);
    const int64_t grain = std::max<int64_t>(1, kWorkPerThread / ceil_div(work, pieces));
    parallel_for(0, taking_.num_outer * pieces, grain, [&](int64_t begin, int64_t end) {
      Block block;
      Piece piece{0, size, 0, columns};
      int64_t outer = begin / pieces, number = begin % pieces;
      for (int64_t unit = begin; unit < end; ++unit) {
        if (pieces > 1) {
          piece.begin = number / across * height;
          piece.size = std::min(height, size - piece.begin);
          piece.first_column = number % across * width;
          piece.width = std::min(width, columns - piece.first_column);
        }
        const Offsets at = taking_.outer(outer);
        const T* from = parts + at.b + piece.first_column * taking_.inner.b;
        T* to = whole + at.a + piece.begin * taking_.stride + piece.first_column * taking_.inner.a;
        make(from, places, piece, to, block);
        if (++number == pieces) {
          number = 0;
          ++outer;
        }
      }
    });
  }

  std::string str() const override { return concat("take, gradient, ", taking_.str()); }

 private:
  // The width and height of a piece of the work: columns, and elements of the indexed dim. A thread
  // that has only a range of the indexed dim must read all places.
  std::pair<int64_t, int64_t> split(int64_t work) const {
    const int64_t columns = taking_.inner.size, size = taking_.size;
    int64_t width = columns, height = size;
    const int64_t threads = work < kWorkPerThread ? 1 : num_threads();
    if (const int64_t wanted = ceil_div(threads, taking_.num_outer); wanted > 1) {
      if (columns >= wanted * kLine) {
        width = ceil_div(columns, wanted);
      } else {
        height = ceil_div(size, wanted);
      }
    }
    // The sums of short floats are in memory of the thread.
    if (kIsShort) {
      const int64_t eighth = size * columns * taking_.num_outer / 8;
      const int64_t most = std::max(kSums, std::min(eighth, taking_.num_places));
      width = std::min(width, std::max(kLine, most / height));
      height = std::min(height, most / width);
    }
    return {width, height};
  }

  void make(const T* from, const void* places, const Piece& piece, T* to, Block& block) const {
    const int64_t stride = taking_.stride, column_stride = taking_.inner.a;
    if constexpr (kIsShort) {
      float* sums = thread_memory<float, Use::kSums>(piece.size * piece.width);
      add_up(from, places, piece, {sums, piece.width, 1}, block);
      if (piece.width == 1) {
        store_(to, sums, {piece.size, stride});
      } else {
        store_(to, sums, {piece.width, column_stride, piece.size, stride});
      }
    } else {
      add_up(from, places, piece, {to, stride, column_stride}, block);
    }
  }

  void add_up(const T* from, const void* places, const Piece& piece, const Sums& sums,
              Block& block) const {
    clear(piece, sums);
    const int64_t count = taking_.num_places;
    const int64_t step =
        kIsShort ? std::clamp<int64_t>(kSums / 16 / piece.width, 1, kBlock) : kBlock;
    for (int64_t first = 0; first < count; first += step) {
      taking_.load(places, first, std::min(step, count - first), 1, block);
      if constexpr (kIsShort) {
        add_block(widened(from, piece, block), piece.width, 1, piece, sums, block);
      } else {
        const int64_t distance = taking_.part_stride();
        add_block(from + (distance < 0 ? 0 : block.part[0]), distance, taking_.inner.b, piece, sums,
                  block);
      }
    }
  }

  // The parts of a block in float32, without gaps.
  const float* widened(const T* from, const Piece& piece, const Block& block) const {
    float* numbers = thread_memory<float, Use::kParts>(block.count * piece.width);
    const int64_t part_stride = taking_.part_stride();
    if (part_stride >= 0 && piece.width == 1) {
      load_(numbers, from + block.part[0], {block.count, part_stride});
    } else if (part_stride >= 0) {
      load_(numbers, from + block.part[0],
            {piece.width, taking_.inner.b, block.count, part_stride});
    } else {
      for (int64_t i = 0; i < block.count; ++i) {
        load_(numbers + i * piece.width, from + block.part[i], {piece.width, taking_.inner.b});
      }
    }
    return numbers;
  }

  static void clear(const Piece& piece, const Sums& sums) {
    const bool is_one_run = (piece.width == 1 || sums.column_stride == 1) &&
                            (piece.size == 1 || sums.stride == piece.width);
    if (is_one_run) {
      std::fill_n(sums.data, piece.size * piece.width, Sum(0));
      return;
    }
    for (int64_t i = 0; i < piece.size; ++i) {
      Sum* row = sums.data + i * sums.stride;
      for (int64_t j = 0; j < piece.width; ++j) row[j * sums.column_stride] = 0;
    }
  }

  // `distance` is that from a part to the next; -1: as the block says.
  void add_block(const Sum* from, int64_t distance, int64_t from_stride, const Piece& piece,
                 const Sums& sums, const Block& block) const {
    if (piece.width == 1 && piece.size == taking_.size && distance >= 0) {
      for (int64_t i = 0; i < block.count; ++i) {
        sums.data[block.along[i] * sums.stride] += from[i * distance];
      }
      return;
    }
    for (int64_t i = 0; i < block.count; ++i) {
      const int64_t place = block.along[i] - piece.begin;
      if (place < 0 || place >= piece.size) continue;
      const Sum* source = from + (distance < 0 ? block.part[i] : i * distance);
      Sum* target = sums.data + place * sums.stride;
      if (piece.width == 1) {
        *target += *source;
      } else if (from_stride == 1 && sums.column_stride == 1) {
        kernels_.add_rows(target, source, 1, piece.width);
      } else {
        for (int64_t j = 0; j < piece.width; ++j) {
          target[j * sums.column_stride] += source[j * from_stride];
        }
      }
    }
  }

  const Taking taking_;
  const Kernels<Sum>& kernels_;
  typename Kernels<Sum>::Load load_;
  typename Kernels<Sum>::Store store_;
};

}  // namespace

std::unique_ptr<const Kernel> make_take(const BoundNode& bound) {
  const Layout &whole = bound.inputs.at(0), &parts = bound.outputs.at(0);
  Taking taking(bound.node, whole, bound.inputs.at(1), parts, parts);
  switch (ir::size_bytes(whole.dtype)) {
    case 1: return std::make_unique<const Take<uint8_t>>(std::move(taking));
    case 2: return std::make_unique<const Take<uint16_t>>(std::move(taking));
    case 4: return std::make_unique<const Take<uint32_t>>(std::move(taking));
    case 8: return std::make_unique<const Take<uint64_t>>(std::move(taking));
    default: throw InternalError(concat("Take: got ", ir::name(whole.dtype)));
  }
}

std::unique_ptr<const Kernel> make_take_grad(const BoundNode& bound) {
  const Layout &parts = bound.inputs.at(0), &whole = bound.outputs.at(0);
  Taking taking(bound.node, whole, bound.inputs.at(1), parts, whole);
  const auto make = [&]<typename T>() -> std::unique_ptr<const Kernel> {
    return std::make_unique<const TakeGrad<T>>(std::move(taking), whole.dtype, isa_of(bound));
  };
  switch (whole.dtype) {
    case DType::kFloat: return make.operator()<float>();
    case DType::kDouble: return make.operator()<double>();
    case DType::kHalf: return make.operator()<c10::Half>();
    case DType::kBFloat16: return make.operator()<c10::BFloat16>();
    default:
      throw InternalError(concat("TakeGrad: got ", ir::name(whole.dtype), ", want a real dtype"));
  }
}

}  // namespace torch_ort::cpu
