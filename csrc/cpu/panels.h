// How factors of products lie in memory; internal to cpu/.
#pragma once

#include "base/rounding.h"
#include "cpu/kernels.h"

namespace torch_ort::cpu {

// At least `n` numbers, such that rows of so many do not evict each other from the first-level
// cache: an odd number of its lines.
template <typename T>
int64_t spread_row(int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  return (ceil_div(n, kLine) / 2 * 2 + 1) * kLine;
}

// The columns of a right factor, as panels that follow each other. The last one is half as wide if
// that is enough for what is left.
class PackedColumns {
 public:
  PackedColumns(int64_t columns, int64_t panel_width)
      : columns_(columns), width_(panel_width), whole_(columns / panel_width * panel_width) {}

  int64_t width_from(int64_t column) const {
    const int64_t left = columns_ - column;
    return left <= width_ / 2 ? width_ / 2 : width_;
  }
  // How many numbers a step of the sums takes.
  int64_t padded() const { return whole_ + (whole_ < columns_ ? width_from(whole_) : 0); }

  // Multiplies with the panels of `steps` steps at `panels`. The product has all but its right
  // factor.
  template <typename T>
  void multiply(const Kernels<T>& kernels, PanelProduct<T> product, const T* panels) const {
    product.b = panels;
    product.b_row = product.width = width_;
    product.b_panel = width_ * product.k;
    product.num_panels = whole_ / width_;
    product.columns = whole_;
    if (whole_ > 0) kernels.multiply(product);
    if (whole_ == columns_) return;
    product.c += whole_;
    if (product.start != nullptr) product.start += whole_;
    product.b += whole_ * product.k;
    product.b_row = product.width = width_from(whole_);
    product.num_panels = 1;
    product.columns = columns_ - whole_;
    kernels.multiply(product);
  }

  // The same for rows that lie anywhere, with steps from `first` on of panels that have `all`.
  template <typename T>
  void multiply(const Kernels<T>& kernels, ScatteredProduct<T> product, const T* panels,
                int64_t first, int64_t all) const {
    product.b = panels + first * width_;
    product.width = width_;
    product.b_panel = width_ * all;
    product.num_panels = whole_ / width_;
    product.columns = whole_;
    if (whole_ > 0) kernels.multiply_scattered(product);
    if (whole_ == columns_) return;
    product.column += whole_;
    product.width = width_from(whole_);
    product.b = panels + whole_ * all + first * product.width;
    product.num_panels = 1;
    product.columns = columns_ - whole_;
    kernels.multiply_scattered(product);
  }

 private:
  int64_t columns_, width_, whole_;
};

}  // namespace torch_ort::cpu
