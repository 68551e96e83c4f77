// How cuDNN chooses algorithms of convolutions.
#pragma once

namespace torch_ort::run {

// While one exists that is on, cuDNN times its algorithms for each convolution of new sizes and
// uses the fastest one from then on, as with torch.backends.cudnn.benchmark. That setting is the
// whole process's: it is what it was again when no object is left that is on.
class ConvSearch {
 public:
  explicit ConvSearch(bool is_on);
  ~ConvSearch();
  ConvSearch(const ConvSearch&) = delete;
  ConvSearch& operator=(const ConvSearch&) = delete;

 private:
  bool is_on_;
};

}  // namespace torch_ort::run
