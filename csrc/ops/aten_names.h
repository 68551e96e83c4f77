// Names of the PyTorch operators that other rooms look for or call. Facts about an operator are in
// its row (op.h).
#pragma once

namespace torch_ort::ops::aten {

inline constexpr const char* kAddcmul = "aten::addcmul";
inline constexpr const char* kBatchNorm = "aten::_native_batch_norm_legit_functional";
inline constexpr const char* kBatchNormBackward = "aten::native_batch_norm_backward";
// Its overload no_stats; the other one writes running statistics.
inline constexpr const char* kBatchNormWithoutStatistics = "aten::_native_batch_norm_legit";
inline constexpr const char* kBinaryCrossEntropyBackward = "aten::binary_cross_entropy_backward";
inline constexpr const char* kBinaryCrossEntropyOfLogits = "aten::binary_cross_entropy_with_logits";
inline constexpr const char* kCat = "aten::cat";
inline constexpr const char* kCelu = "aten::celu";
inline constexpr const char* kClampMax = "aten::clamp_max";
inline constexpr const char* kClampMin = "aten::clamp_min";
inline constexpr const char* kClone = "aten::clone";
inline constexpr const char* kConvolution = "aten::convolution";
inline constexpr const char* kConvolutionBackward = "aten::convolution_backward";
inline constexpr const char* kCopy = "aten::copy_";
// The copy as a new tensor; the first argument says its dtype and layout.
inline constexpr const char* kCopyLike = "aten::copy";
inline constexpr const char* kDiv = "aten::div";
inline constexpr const char* kDropoutBackward = "aten::native_dropout_backward";
inline constexpr const char* kEluBackward = "aten::elu_backward";
inline constexpr const char* kEmbeddingBackward = "aten::embedding_dense_backward";
inline constexpr const char* kFlashAttention = "aten::_scaled_dot_product_flash_attention_for_cpu";
inline constexpr const char* kFlashAttentionBackward =
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward";
inline constexpr const char* kGlu = "aten::glu";
inline constexpr const char* kGluBackward = "aten::glu_backward";
inline constexpr const char* kGroupNorm = "aten::native_group_norm";
inline constexpr const char* kGroupNormBackward = "aten::native_group_norm_backward";
inline constexpr const char* kHardShrink = "aten::hardshrink";
inline constexpr const char* kHardShrinkBackward = "aten::hardshrink_backward";
inline constexpr const char* kHardSigmoidBackward = "aten::hardsigmoid_backward";
inline constexpr const char* kHardTanhBackward = "aten::hardtanh_backward";
inline constexpr const char* kHuberLoss = "aten::huber_loss";
inline constexpr const char* kHuberLossBackward = "aten::huber_loss_backward";
inline constexpr const char* kIndex = "aten::index";
inline constexpr const char* kIndexAdd = "aten::index_add";
inline constexpr const char* kIndexPut = "aten::index_put";
inline constexpr const char* kLayerNorm = "aten::native_layer_norm";
inline constexpr const char* kLayerNormBackward = "aten::native_layer_norm_backward";
inline constexpr const char* kLerp = "aten::lerp";
inline constexpr const char* kLogSigmoid = "aten::log_sigmoid_forward";
inline constexpr const char* kLogSigmoidBackward = "aten::log_sigmoid_backward";
inline constexpr const char* kLogSoftmaxBackward = "aten::_log_softmax_backward_data";
inline constexpr const char* kMishBackward = "aten::mish_backward";
inline constexpr const char* kMseLoss = "aten::mse_loss";
inline constexpr const char* kMseLossBackward = "aten::mse_loss_backward";
inline constexpr const char* kMul = "aten::mul";
inline constexpr const char* kNllLoss = "aten::nll_loss_forward";
inline constexpr const char* kNllLossBackward = "aten::nll_loss_backward";
inline constexpr const char* kNorm = "aten::norm";
inline constexpr const char* kPReluBackward = "aten::_prelu_kernel_backward";
inline constexpr const char* kRmsNorm = "aten::_fused_rms_norm";
inline constexpr const char* kRmsNormBackward = "aten::_fused_rms_norm_backward";
inline constexpr const char* kRsqrt = "aten::rsqrt";
inline constexpr const char* kSafeSoftmax = "aten::_safe_softmax";
inline constexpr const char* kSelectBackward = "aten::select_backward";
inline constexpr const char* kSelectScatter = "aten::select_scatter";
inline constexpr const char* kSliceBackward = "aten::slice_backward";
inline constexpr const char* kSliceScatter = "aten::slice_scatter";
inline constexpr const char* kSmoothL1Loss = "aten::smooth_l1_loss";
inline constexpr const char* kSmoothL1LossBackward = "aten::smooth_l1_loss_backward";
inline constexpr const char* kSoftmaxBackward = "aten::_softmax_backward_data";
inline constexpr const char* kSoftplus = "aten::softplus";
inline constexpr const char* kSoftplusBackward = "aten::softplus_backward";
inline constexpr const char* kSoftShrink = "aten::softshrink";
inline constexpr const char* kSoftShrinkBackward = "aten::softshrink_backward";
// run/autograd/sparse_gradients.cpp
inline constexpr const char* kSparseSum = "torch_ort::sparse_sum";
inline constexpr const char* kStd = "aten::std";
inline constexpr const char* kStdMean = "aten::std_mean";
inline constexpr const char* kTanhBackward = "aten::tanh_backward";
inline constexpr const char* kThreshold = "aten::threshold";
inline constexpr const char* kVar = "aten::var";
inline constexpr const char* kVarMean = "aten::var_mean";
inline constexpr const char* kXlogy = "aten::xlogy";

}  // namespace torch_ort::ops::aten
