"""The words of random programs: lines of Python with holes for values.

Holes: {f} a float tensor, {g} one that broadcasts with the first value of the line, {h} another
such; {z} a complex tensor, {y} one that broadcasts; {a} any tensor, {b} any that broadcasts with
the first; {i} integers, {m} bools that broadcast; {d}, {e} two dims of the first value; {n} a
number, {k} a small size, {t} a dtype; {s} the sizes of the first value as an expression; {w:...} a
new parameter with these sizes, where `last`, `second` are sizes of the first value; {u:...} the
same for a buffer. Holes that differ, if only by a space, are filled with different buffers.
An expression that gives several tensors gives several values.
"""

from __future__ import annotations

POINTWISE = [
    f"{{f}}.{name}()"
    for name in (
        "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh",
        "deg2rad", "digamma", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "floor", "frac",
        "lgamma", "log", "log10", "log1p", "log2", "logit", "neg", "rad2deg", "reciprocal",
        "relu", "round", "rsqrt", "sgn", "sigmoid", "sign", "sin", "sinc", "sinh", "sqrt",
        "square", "tan", "tanh", "trunc", "i0", "nan_to_num", "positive", "isnan", "isinf",
        "isfinite", "signbit", "logical_not", "conj", "clone", "contiguous", "detach", "ravel",
    )
]  # fmt: skip
ACTIVATIONS = [
    f"F.{call}"
    for call in (
        "celu({f}, 1.3)", "elu({f})", "elu({f}, 0.7)", "gelu({f})", "gelu({f}, approximate='tanh')",
        "glu({f}, {d})", "hardshrink({f}, 0.3)", "hardsigmoid({f})", "hardswish({f})",
        "hardtanh({f}, -0.4, 0.8)", "leaky_relu({f}, 0.2)", "logsigmoid({f})", "mish({f})",
        "relu6({f})", "selu({f})", "silu({f})", "softplus({f})", "softplus({f}, 2.0, 3.0)",
        "softshrink({f}, 0.2)", "softsign({f})", "tanhshrink({f})", "threshold({f}, 0.1, -0.5)",
        "prelu({f}, {w:1})", "softmin({f}, {d})", "normalize({f}, dim={d})",
    )
]  # fmt: skip
BINARY = [
    "{f} + {g}", "{f} - {g}", "{f} * {g}", "{f} / {g}", "{f} ** 2", "{f} ** 3",
    "{f}.abs() ** 0.5", "{f} * {n}", "{f} + {n}", "{n} - {f}", "{n} / {f}", "{f} % {n}",
    "{f} // {n}", "{f}.add({g}, alpha={n})", "{f}.sub({g}, alpha={n})", "torch.rsub({f}, {g})",
    "torch.maximum({f}, {g})", "torch.minimum({f}, {g})", "torch.fmax({f}, {g})",
    "torch.fmin({f}, {g})", "torch.atan2({f}, {g})", "torch.hypot({f}, {g})",
    "torch.copysign({f}, {g})", "torch.fmod({f}, {n})", "torch.remainder({f}, {g})",
    "torch.logaddexp({f}, {g})", "torch.logaddexp2({f}, {g})", "torch.xlogy({f}, {g}.abs())",
    "torch.lerp({f}, {g}, {n})", "torch.lerp({f}, {g}, {h})", "torch.addcmul({f}, {g}, {h})",
    "torch.addcmul({f}, {g}, {h}, value={n})", "torch.addcdiv({f}, {g}, {h}.abs() + 1)",
    "torch.dist({f}, {g})", "{f}.clamp(-0.5, 0.7)", "{f}.clamp(min=0.1)", "{f}.clamp(max={g})",
    "{f}.clamp_min(0.0)", "torch.heaviside({f}, {g})", "torch.nextafter({f}, {g})",
    "torch.pow(2.0, {f})", "torch.pow({f}.abs() + 0.1, {g})",
    "torch.div({f}, {g}, rounding_mode='floor')", "torch.div({f}, {n}, rounding_mode='trunc')",
    "torch.where({m}, {f}, {g})", "torch.where({f} > {g}, {f}, {n})", "{f}.masked_fill({m}, {n})",
    "torch.mul({f}, {i})", "{f} + {i}", "{f} * {m}", "torch.float_power({f}.abs(), {n})",
    "torch.true_divide({f}, {g})", "torch.special.xlog1py({f}, {g}.abs())",
    "torch.special.entr({f})", "torch.special.erfcx({f})",
]  # fmt: skip
COMPARISONS = [
    "{a} > {b}", "{a} >= {b}", "{a} < {b}", "{a} <= {b}", "{a} == {b}", "{a} != {b}", "{f} > {n}",
    "{f}.isclose({g})", "{m} & {m}", "{m} | {m}", "{m} ^ {m}", "~{m}", "{f}.logical_and({g})",
    "{m}.any({d})", "{m}.all({d})", "{m}.any()", "{a}.bool()",
    "torch.isin({i}, torch.tensor([0, 2]))",
]  # fmt: skip
INTEGERS = [
    "{i} + {i}", "{i} * 3", "{i} // 2", "{i} % 3", "-{i}", "{i}.abs()", "{i}.clamp(0, 2)",
    "{i} << 1", "{i} & 3", "{i}.sum({d})", "{i}.cumsum({d})", "{f}.argmax({d})",
    "{f}.argmin({d})", "{f}.argsort(dim={d}, stable=True)", "{m}.sum({d})", "{m}.cumsum({d})",
    "({f} * 4).long()", "{f}.int()", "torch.arange({a}.shape[{d}])",
    "torch.bucketize({f}, torch.tensor([-1.0, 0.0, 0.5]))",
    "torch.searchsorted(torch.tensor([-1.0, 0.0, 0.5]), {f})", "{m}.long()",
    "{f}.count_nonzero({d})",
]  # fmt: skip
REDUCTIONS = [
    "{f}.sum()", "{f}.mean()", "{f}.sum({d})", "{f}.sum({d}, keepdim=True)", "{f}.mean({d})",
    "{f}.mean({d}, keepdim=True)", "{f}.sum(({d}, {e}))", "{f}.mean(({d}, {e}), keepdim=True)",
    "{f}.amax({d})", "{f}.amin({d}, keepdim=True)", "{f}.amax(({d}, {e}))", "{f}.max()",
    "{f}.min()", "{f}.max({d})", "{f}.min({d}, keepdim=True)", "{f}.prod({d})", "{f}.prod()",
    "{f}.var({d})", "{f}.var({d}, unbiased=False)", "{f}.std({d}, keepdim=True)",
    "torch.var_mean({f}, {d})", "torch.std_mean({f}, {d})", "{f}.logsumexp({d})", "{f}.norm()",
    "{f}.norm(dim={d})", "torch.linalg.vector_norm({f}, 3, {d})",
    "torch.linalg.vector_norm({f}, float('inf'), {d})", "{f}.norm(1, {d})", "{f}.cumsum({d})",
    "{f}.cumprod({d})", "{f}.logcumsumexp({d})", "{f}.cummax({d})", "{f}.cummin({d})",
    "{f}.median({d})", "{f}.median()", "{f}.nansum({d})", "{f}.nanmean({d})",
    "{f}.quantile(0.3, {d})", "{f}.aminmax(dim={d})", "torch.trapezoid({f}, dim={d})",
    "{f}.softmax({d})", "{f}.log_softmax({d})", "F.softmax({f}, {d}, dtype=torch.float64)",
    "{f}.sort({d})", "{f}.sort({d}, descending=True)", "{f}.topk(1, {d})", "{f}.kthvalue(1, {d})",
    "{f}.sum({d}, dtype=torch.float64)", "{f}.mode({d})[0]", "torch.renorm({f}, 2, {d}, 1.0)",
    "torch.diff({f}, dim={d})", "{f}.all()", "{f}.sum_to_size({f}.shape)",
    "torch.logsumexp({f}, ({d}, {e}))",
]  # fmt: skip
SHAPES = [
    "{a}.transpose({d}, {e})", "{a}.mT", "{a}.flatten()", "{a}.flatten({d}, {e})",
    "{a}.unsqueeze({d})", "{a}.unsqueeze(-1)", "{a}.squeeze({d})", "{a}.squeeze()",
    "{a}.reshape(-1)", "{a}.view({s})", "{a}.view(-1)", "{a}.reshape(-1, {a}.shape[-1])",
    "{a}.movedim({d}, {e})", "{a}.flip({d})", "{a}.flip({d}, {e})", "{a}.roll(1, {d})",
    "{a}.roll(-2)", "{a}.narrow({d}, 0, 1)", "{a}.select({d}, 0)", "{a}.select({d}, -1)",
    "{a}[0]", "{a}[-1]", "{a}[1:]", "{a}[:-1]", "{a}[..., 1:]", "{a}[..., ::2]", "{a}[:, None]",
    "{a}[..., None]", "{a}[..., 0]", "{a}[:, :2]", "{a}[::2]", "{a}[None]",
    "{a}.expand(2, *{a}.shape)", "{a}.unsqueeze({d}).expand_as({a}.unsqueeze({d}))",
    "{a}.repeat(2, *[1] * {a}.dim())", "{a}.repeat_interleave(2, {d})", "{a}.tile(2)",
    "{a}.chunk(2, {d})", "{a}.split(2, {d})", "{a}.tensor_split(2, {d})", "{a}.unbind({d})[0]",
    "{a}.unbind(-1)", "torch.cat([{a}, {a}], {d})", "torch.cat([{f}, {f}.exp()], {d})",
    "torch.cat([{a}, {b}], {d})", "torch.stack([{a}, {a}], {d})",
    "torch.stack([{f}, {f} * 2], {d})", "torch.cat([{f}[:1], {f}])", "{a}.diagonal(0, {d}, {e})",
    "{f}.tril()", "{f}.triu(1)", "torch.diag_embed({a})", "F.pad({f}, (1, 2))",
    "F.pad({f}, (-1, 1), value={n})", "F.pad({f}, (1, 1), mode='replicate')",
    "F.pad({f}, (1, 1), mode='reflect')", "{a}.unfold({d}, 2, 1)", "{a}.unfold({d}, 1, 2)",
    "{a}.unflatten(-1, (2, -1))",
    "torch.meshgrid({a}[:2].flatten(), {a}.flatten()[:3], indexing='ij')[0]",
    "torch.broadcast_tensors({a}, {b})[0]", "{a}.rot90(1, ({d}, {e}))", "torch.block_diag({f})",
    "{a}.permute(*range({a}.dim())[::-1])", "{a}.T", "torch.swapaxes({a}, {d}, {e})",
    "{a}.as_strided(({a}.shape[{d}],), (1,))", "torch.hstack([{a}, {a}])",
    "torch.vstack([{a}, {a}])",
    "torch.atleast_2d({a})", "{a}.new_zeros({s})", "{f}.new_ones({s})", "{a}.expand({s})",
    "{a}.view_as({a})", "torch.cartesian_prod({a}.flatten()[:2], {a}.flatten()[:2])",
    "torch.narrow_copy({a}, {d}, 0, 1)",
]  # fmt: skip
INDEXING = [
    "{a}[{i}.clamp(0, 1)]", "{a}[torch.tensor([0, 0, 1])]", "{a}[:, torch.tensor([1, 0])]",
    "{a}[..., torch.tensor([0, -1, 0])]", "{a}.index_select({d}, torch.tensor([1, 0, 1]))",
    "{a}.gather({d}, {a}.argsort(dim={d}, stable=True))",
    "{a}.gather({d}, torch.zeros_like({a}, dtype=torch.long))", "{a}.take(torch.tensor([0, 1]))",
    "{f}.take_along_dim({f}.argsort(dim={d}, stable=True), {d})",
    "{f}.scatter({d}, torch.zeros_like({f}, dtype=torch.long), {f})",
    "{f}.scatter_add({d}, torch.zeros_like({f}, dtype=torch.long), {f})",
    "{f}.scatter({d}, {f}.argmax({d}, keepdim=True), {n})",
    "{f}.index_add({d}, torch.tensor([0]), {f}.narrow({d}, 0, 1))",
    "{f}.index_fill({d}, torch.tensor([0]), {n})",
    "{f}.index_copy({d}, torch.tensor([0]), {f}.narrow({d}, 0, 1))",
    "{f}.scatter_reduce({d}, torch.zeros_like({f}, dtype=torch.long), {f}, 'amax')",
    "{f}.index_put((torch.tensor([0]),), {f}[:1] * 2, accumulate=True)",
    "{f}.select_scatter({f}.select({d}, 0), {d}, 0)",
    "{f}.slice_scatter({f}.narrow({d}, 0, 1), {d}, 0, 1)", "F.one_hot({i}.clamp(0, 3).long(), 4)",
    "F.embedding({i}.clamp(0, 4).long(), {w:5, 3})",
    "F.embedding({i}.clamp(0, 4).long(), {w:5, 4}, padding_idx=1)", "{f}[{i}.clamp(0, 1), 0]",
    "{f}[0, {i}.clamp(0, 1)]",
    "F.embedding_bag({i}.clamp(0, 4).long().flatten()[None], {w:5, 3}, mode='sum')",
    "{f}.masked_scatter({m}, {f})",
]  # fmt: skip
PRODUCTS = [
    "{f} @ {w:last, 4}", "{f} @ {w:last, 3}", "F.linear({f}, {w:5, last}, {w:5})",
    "F.linear({f}, {w:4, last})", "{f} @ {f}.mT", "{f}.mT @ {f}", "torch.matmul({f}, {g})",
    "torch.mm({f}, {w:last, 2})", "torch.mv({f}, {w:last})", "torch.bmm({f}, {f}.mT)",
    "torch.baddbmm({f} @ {f}.mT, {f}, {f}.mT)", "torch.addmm({w:3}, {f}, {w:last, 3})",
    "torch.addmm({w:3}, {f}, {w:last, 3}, beta=0.5, alpha=2)",
    "torch.einsum('...i,ij->...j', {f}, {w:last, 3})",
    "torch.einsum('...ij,...kj->...ik', {f}, {f})",
    "torch.outer({f}.flatten()[:3], {f}.flatten())", "torch.dot({f}.flatten(), {f}.flatten())",
    "torch.tensordot({f}, {w:last, 2}, 1)", "torch.cdist({f}, {f} * 0.5 + 1)",
    "F.bilinear({f}, {f}, {w:2, last, last})", "torch.kron({f}[:1], {w:2, 2})",
    "torch.inner({f}, {f})", "torch.linalg.multi_dot([{f}, {w:last, 3}, {w:3, 2}])",
    "F.scaled_dot_product_attention({f}, {f}, {f})",
    # Whether a masked NaN spoils a sum, eager's own kernels do not agree about.
    "F.scaled_dot_product_attention(*[{f}.nan_to_num(0.0, 1.0, -1.0)] * 3, is_causal=True)",
    "F.cosine_similarity({f}, {g}, {d})",
    "F.scaled_dot_product_attention(*[{f}.expand(2, 2, *{f}.shape[-2:])] * 3)",
    "F.pairwise_distance({f}, {g})", "torch.cumulative_trapezoid({f}, dim={d})", "torch.cov({f})",
    "torch.logdet({f} @ {f}.mT + 2 * torch.eye({f}.shape[-2]))",
]  # fmt: skip
LAYERS = [
    "F.layer_norm({f}, ({f}.shape[-1],), {w:last}, {w:last})",
    "F.layer_norm({f}, ({f}.shape[-1],))", "F.layer_norm({f}, {f}.shape[-2:])",
    "F.rms_norm({f}, ({f}.shape[-1],), {w:last})", "F.group_norm({f}, 1)",
    "F.group_norm({f}, 2, {w:second}, {w:second})", "F.instance_norm({f})",
    "F.batch_norm({f}, {u:second}, {u: second}, {w:second}, {w:second}, self.training)",
    "F.batch_norm({f}, None, None, training=True)", "F.local_response_norm({f}, 2)",
    "F.conv1d({f}, {w:3, second, 2})", "F.conv1d({f}, {w:4, second, 3}, {w:4}, padding=1)",
    "F.conv2d({f}, {w:3, second, 2, 2}, padding=1)",
    "F.conv2d({f}, {w:4, second, 3, 3}, {w:4}, stride=2, padding=1)",
    "F.conv2d({f}, {w:second, 1, 1, 1}, groups={f}.shape[1])",
    "F.conv_transpose1d({f}, {w:second, 2, 2}, stride=2)",
    "F.conv_transpose2d({f}, {w:second, 2, 2, 2})", "F.max_pool1d({f}, 2)",
    "F.max_pool2d({f}, 2, 1)", "F.avg_pool1d({f}, 2)", "F.avg_pool2d({f}, 2, 1, 1)",
    "F.adaptive_avg_pool1d({f}, 2)", "F.adaptive_avg_pool2d({f}, 1)",
    "F.adaptive_max_pool1d({f}, 2)", "F.lp_pool1d({f}.abs() + 0.1, 2, 2)",
    "F.interpolate({f}, scale_factor=2)", "F.interpolate({f}, scale_factor=2, mode='bilinear')",
    "F.interpolate({f}, size=4, mode='linear')", "F.pixel_shuffle({f}, 1)",
    "F.interpolate({f}, scale_factor=1.5, mode='bicubic')", "F.unfold({f}, 2)",
    "F.channel_shuffle({f}, 2)",
]  # fmt: skip
LOSSES = [
    f"F.{name}({{f}}, {{g}}.detach(){more})"
    for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
    for more in ("", ", reduction='sum'", ", reduction='none'")
] + [
    "F.cross_entropy({f}, {f}.argmax(1))",
    "F.cross_entropy({f}, {f}.argmax(1), label_smoothing=0.1)",
    "F.cross_entropy({f}, {f}.argmax(1), reduction='none')",
    "F.cross_entropy({f}, {f}.softmax(1).detach(), reduction='sum')",
    "F.nll_loss({f}.log_softmax(1), {f}.argmin(1), ignore_index=0)",
    "F.cross_entropy({f}, {f}.argmax(1), {w:second}.detach().abs())",
    "F.binary_cross_entropy({f}.sigmoid(), {g}.sigmoid().detach())",
    "F.binary_cross_entropy_with_logits({f}, {g}.sigmoid().detach())",
    "F.kl_div({f}.log_softmax(-1), {f}.softmax(-1).detach(), reduction='batchmean')",
    "F.soft_margin_loss({f}, {g}.detach().sign())", "F.poisson_nll_loss({f}, {g}.detach().abs())",
    "F.hinge_embedding_loss({f}, {g}.detach().sign())",
    "F.gaussian_nll_loss({f}, {g}.detach(), {f}.exp())",
    "F.margin_ranking_loss({f}, {g}, {h}.detach().sign())",
    "F.cosine_embedding_loss({f}, {f} * 2, torch.ones({f}.shape[0]))",
    "F.triplet_margin_loss({f}, {g}, {h})", "F.multi_margin_loss({f}, {f}.argmax(1))",
]  # fmt: skip
DTYPES = [
    "{a}.to({t})", "{f}.to({t}).to({f}.dtype)", "{a}.float()", "{a}.double()", "{f}.type_as({a})",
    "({f}.to({t}) * 2).float()", "{f}.bfloat16().float()", "torch.complex({f}, {f}).abs()",
    "torch.view_as_real(torch.complex({f}, {f} * 2) * 1j)", "torch.fft.rfft({f}).abs()",
    "torch.fft.fft({f}).real", "torch.view_as_real(torch.polar({f}, {f}))",
]  # fmt: skip
CREATED = [
    "torch.zeros_like({f})", "torch.ones_like({f})", "torch.full_like({f}, {n})",
    "torch.full({s}, {n})", "torch.arange(float({a}.shape[{d}]))", "torch.eye({a}.shape[{d}])",
    "torch.linspace(0.0, 1.0, {a}.shape[{d}])", "torch.tensor([1.0, -2.0, 0.5])",
    "torch.tensor(0.5)", "torch.full_like({f}, float('inf'))", "torch.scalar_tensor(2.0)",
]  # fmt: skip
RANDOM = [
    "F.dropout({f}, 0.3, self.training)", "F.dropout({f}, 0.5)", "torch.rand_like({f})",
    "torch.randn({s})", "torch.randn_like({f}) * {f}", "torch.bernoulli({f}.sigmoid())",
    "F.dropout1d({f}, 0.4, self.training)", "F.alpha_dropout({f}, 0.2, self.training)",
    "torch.randint(0, 4, {s})", "torch.randperm({a}.shape[0])",
    "F.rrelu({f}, training=self.training)", "torch.normal({f}, 0.1)",
    "F.gumbel_softmax({f}, dim={d})", "torch.rand({s}) < 0.5",
    "torch.multinomial({f}.softmax(-1), 1)",
]  # fmt: skip
WRITES = [
    f"{{f}}.{call}"
    for call in (
        "add_({g})", "sub_({g})", "mul_({g})", "div_(2)", "mul_({n})", "add_(1)", "relu_()",
        "tanh_()", "sigmoid_()", "exp_()", "zero_()", "fill_({n})", "copy_({g})",
        "clamp_(-0.5, 0.5)", "neg_()", "abs_()", "masked_fill_({m}, {n})", "addcmul_({g}, {h})",
        "lerp_({g}, 0.3)", "pow_(2)", "sqrt_()", "floor_()", "t_()", "unsqueeze_(0)",
        "transpose_({d}, {e})", "squeeze_({d})", "cumsum_({d})", "tril_()",
        "index_add_({d}, torch.tensor([0]), {f}.narrow({d}, 0, 1))",
        "index_fill_({d}, torch.tensor([0]), {n})",
        "scatter_({d}, {f}.argmax({d}, keepdim=True), {n})", "fill_diagonal_({n})",
        "renorm_(2, {d}, 1.0)", "narrow({d}, 0, 1).mul_({n})", "select({d}, 0).add_({n})",
        "view(-1).mul_(2)", "transpose({d}, {e}).add_(0.5)", "squeeze().sin_()",
        "unbind({d})[0].zero_()", "flatten().cos_()", "as_strided((1,), (1,)).add_(1)",
        "diagonal().mul_(2)", "detach().mul_(0.9)", "data.mul_(0.9)",
    )
] + [
    "{f} += {g}", "{f} *= {n}", "{f}[0] = {n}", "{f}[..., 0] = {n}", "{f}[{m}] = {n}",
    "{f}[1:] = {f}[:-1]", "{f}[:, 0] += 1", "{f}[0] *= {n}", "F.relu({f}, inplace=True)",
    "F.leaky_relu_({f}, 0.1)", "{i}.add_(1)", "{i}[0] = 0", "{m}.logical_not_()",
    "{f}[torch.tensor([0])] += 1", "{f}.chunk(2, {d})[0].mul_({n})",
    "F.dropout({f}, 0.3, self.training, inplace=True)", "torch.mul({f}, 2, out={f})",
    "{f}.uniform_()", "{f}.exponential_()", "{f}.normal_()",
]  # fmt: skip
STATE = [
    "{u:4}.add_(1)", "{u:3}.mul_(0.9).add_({f}.detach().mean(), alpha=0.1)",
    "{u:2}[0] = {f}.detach().sum()", "self.count = self.count + 1",
    "self.last = {f}.detach().mean()", "self.count += 1",
    "with torch.no_grad():\n    {u:2}.copy_({f}.mean() * torch.ones(2))",
    "{u:3}.lerp_({f}.detach().amax().expand(3), 0.5)", "self.count.add_({f}.shape[0])",
    "{u:2} += {f}.detach().flatten()[0]",
]  # fmt: skip
COMPLEX = [
    "torch.complex({f}, {g})", "torch.complex({f}.sin(), {f})", "torch.polar({f}.abs(), {f})",
    "torch.fft.fft({f})", "torch.fft.rfft({f})", "torch.fft.fft({f}, dim={d})",
    "torch.fft.fft2({f})", "torch.fft.ifft({z})", "torch.fft.irfft({z})",
    "torch.fft.fft({z}, norm='ortho')", "torch.fft.fftshift({z}, {d})", "{z}.conj()",
    "{z}.conj().resolve_conj()", "{z}.real", "{z}.imag", "{z}.abs()", "{z}.angle()",
    "torch.view_as_real({z})", "torch.view_as_complex(torch.stack([{f}, {f} * 2], -1))",
    "torch.view_as_complex(torch.view_as_real({z}) * 0.5)", "{z} + {y}", "{z} * {y}", "{z} - {y}",
    "{z} * {g}", "{z} + {n}", "{z} * 1j", "{z} / ({y}.abs() + 1)", "{z} @ {z}.mH", "{z}.mT",
    "{z}.exp()", "{z}.sin()", "{z}.tanh()", "{z}.square()", "{z}.sqrt()", "{z}.reciprocal()",
    "{z}.sgn()", "{z}.sum({d})", "{z}.mean()", "{z}.sum({d}, keepdim=True)", "{z}.cumsum({d})",
    "{z}.prod({d})", "torch.cat([{z}, {z}.conj()], {d})", "{z}.clone()", "-{z}", "{z}[0]",
    "{z}[..., 1:]", "{z}.to(torch.complex128)", "torch.where({m}, {z}, {y})",
    "torch.where({f} > 0, torch.complex({f}, {f}), 1j)", "{z} == {y}", "{z}.masked_fill({m}, 1j)",
    "torch.vdot({z}.flatten(), {z}.flatten())", "torch.view_as_real({z}).sum(-1)",
    "torch.view_as_real({z}).flatten(-2)", "{z}.abs().square()", "torch.abs({z} * {z}.conj())",
    "torch.linalg.eigvals({f}.reshape(-1)[:4].reshape(2, 2) + torch.tensor([[3.0, 0], [0, 0]]))",
    "torch.einsum('...i,...i->...', {z}, {z}.conj())", "torch.stft({f}.flatten(), 4, 2, "
    "window=torch.ones(4), return_complex=True)", "{z}.numel() * {z}", "{z}.is_complex() * {z}",
]  # fmt: skip
MASKS = [
    "{a}[{m}]", "{f}[{f} > 0]", "{f}[{f} > 9]", "{f}[{f} <= 9]", "{f}.masked_select({m})",
    "{f}.masked_select({f} > 0.2)", "{f}[({f} > 0).flatten(1).any(1)]", "{f}[:, {f}[0] > 0]",
    "{f}[..., {f}.flatten(0, -2)[0] > 0]", "{f}.nonzero()", "({f} > 0).nonzero(as_tuple=True)[0]",
    "{f}[({f} > 0).nonzero(as_tuple=True)]", "torch.where({f} > 0)[0]", "{f}[{m}].sum()",
    "{f}[{f} > 0].square().mean()", "{f}[{f} > 0].view(-1, 1).expand(-1, 3)",
    "{f}[{f} > 0].unsqueeze(0)", "{f}[{f} > 0] + 1", "{f}[{f} > 0].sort()[0]",
    "{f}[({f} > 0).flatten(1).any(1)] @ {w:last, 3}", "{f}[{f}.sum() > 0]",
    "F.layer_norm({f}[({f} > 0).flatten(1).any(1)], ({f}.shape[-1],))",
    "F.linear({f}[{f}.flatten(1).sum(1) > 0], {w:5, last}, {w:5})",
    "torch.cat([{f}[{f} > 0], {f}[~({f} > 0)]])", "{f}[{f} > 0].softmax(0)",
    "{f}[{f} > 0].cumsum(0)", "{f}.new_zeros({s}).masked_scatter({f} > 0, {f}[{f} > 0])",
    "{f}[{f} > 0].detach()", "{f}[{f} > 0].reshape(1, -1).mT", "{f}[({f} > 0).any({d}), ...]",
    "{f}[torch.ones({f}.shape[0], dtype=torch.bool)]", "{f}[{f} != {f}]", "{f}[True]",
    "F.mse_loss({f}[{f} > 0], ({f}.detach() * 2)[{f} > 0], reduction='sum')",
    "F.cross_entropy({f}[{f}.sum(1) > 0], {f}.argmax(1)[{f}.sum(1) > 0], reduction='sum')",
    "{i}[{i} > 0]", "{f}[{f} > 0].shape[0] * {f}", "{f} / max(1, {f}[{f} > 0].numel())",
    "torch.repeat_interleave({f}, ({f}.flatten(1).sum(1) > 0).long(), dim=0)",
    "{f}.unique()", "torch.bincount({i}.flatten().clamp(0, 9))",
]  # fmt: skip
MASKED_WRITES = [
    "{f}[{m}] = {n}", "{f}[{f} > 0] = {n}", "{f}[{f} > 0.3] = {w:1}", "{f}[{f} > 0] *= {n}",
    "{f}[{f} > 9] = {w:1}", "{f}[{f} <= 9] = {w:1}", "{f}[{m}] = {f}[{m}] * 2",
    "{f}[({f} > 0).flatten(1).any(1)] = {w:last}", "{f}[({f} > 0).flatten(1).any(1)] = 0",
    "{f}[:, {f}[0] > 0] = {n}", "{f}[{f} > 0] = {f}[{f} > 0].exp()", "{f}[{m}] += {w:1}",
    "{f}[{f} > 0, ...] = {n}", "{f}[{f}.sum() > 0] = {n}", "{f}[{f}.sum(-1) > 0, 0] = {w:1}",
    "{f}.masked_scatter_({f} > 0, {f}.exp())", "{f}[{f} > 0] = -{f}[{f} > 0]",
    "{f}[{f} != {f}] = 0", "{f}[({f} > 0).nonzero(as_tuple=True)] = {n}",
]  # fmt: skip
EDGES = [
    "{f}.index_select(0, torch.arange(2 * {f}.shape[0]) % {f}.shape[0])",
    "torch.zeros_like({f}).index_add(0, torch.arange({f}.shape[0]).flip(0) // 2, {f})",
    "torch.zeros_like({f}).index_add({d}, torch.arange({f}.shape[{d}]) // 2, {f}.exp())",
    "torch.zeros_like({f}).scatter_add({d}, {f}.argsort(dim={d}, stable=True) // 2, {f})",
    "{f}.new_zeros(4, {f}.shape[-1]).index_add(0, torch.arange({f}.shape[0]) % 4, {f})",
    "{f}.scatter_reduce({d}, {f}.argsort(dim={d}, stable=True) // 2, {f}, 'sum')",
    "{f}.scatter_reduce({d}, {f}.argsort(dim={d}, stable=True) // 2, {f}, 'mean')",
    "{f}.gather({d}, {f}.argsort(dim={d}, stable=True).flip({d}))",
    "{f}.gather({d}, {f}.argmax({d}, keepdim=True))",
    "{f}[torch.arange(2 * {f}.shape[0]) // 2] * {f}[torch.arange(2 * {f}.shape[0]) // 2].sin()",
    "{f}.index_add({d}, torch.zeros(3, dtype=torch.long), {f}.index_select({d}, "
    "torch.tensor([0, 1, 1])), alpha={n})",
    "{f}.index_reduce({d}, torch.tensor([1, 0, 1]), {f}.index_select({d}, "
    "torch.tensor([0, 1, 1])), 'mean')",
    "{f}[{i}.flatten().clamp(0, 1)]", "{f}.index_select({d}, {i}.flatten().clamp(0, 1))",
    "F.embedding({i}.clamp(0, 1).long(), {f}.flatten(1))",
    "torch.segment_reduce({f}, 'sum', lengths=torch.tensor([1, {f}.shape[0] - 1]), axis=0)",
    "{v} = torch.arange(2 * {f}.shape[0]) % {f}.shape[0]\n"
    "{v 2} = ({v} * 2 + 1) % {f}.shape[0]\n"
    "{v 3} = ({f}[{v}] + {f}[{v 2}]).tanh().exp()\n"
    "{v 4} = torch.zeros_like({f}).index_add(0, {v 2}, {v 3})\n"
    "{v 5} = torch.zeros_like({f}).index_add(0, {v 2}, {f}[{v}] * {v 3} / {v 4}[{v 2}])",
]  # fmt: skip
NUMBERS = [
    "{f} * self.hot", "{f} / (abs(self.hot) + 1)", "{f} + self.step", "{f} * self.step",
    "{f} - self.hot", "self.hot - {f}", "{f} ** self.step", "{f}.abs() ** abs(self.hot)",
    "{f}.clamp(max=self.hot)", "{f}.clamp(-abs(self.hot), self.step)", "{f} > self.hot",
    "{f}.masked_fill({m}, self.hot)", "torch.where({m}, {f}, self.hot)",
    "{f} * (self.hot if self.hot > 0 else 1.0)", "{f} * (1 - self.hot) + {g} * self.hot",
    "torch.lerp({f}, {g}, self.hot)", "torch.add({f}, {g}, alpha=self.hot)",
    "torch.full_like({f}, self.hot)", "{i} * self.step", "{i} + self.hot", "{i} // (self.step + 1)",
    "F.leaky_relu({f}, self.hot)", "{f} * (self.step % 3)",
    "{f} * self.hot ** 2", "{f} * min(self.hot, 0.6)", "{f} * max(self.step, 3)",
    "{f} * (self.step // 2)", "{f} * float(self.step)", "{f} * int(self.hot)",
    "{f}[: self.step]", "{f}.expand(self.step, *{s})", "torch.ones(self.step, 2) * self.hot",
    "{f} * (self.step > 2)", "{f} * self.training", "F.softplus({f}, beta=abs(self.hot) + 1)",
    "torch.addcmul({f}, {g}, {h}, value=self.hot)", "torch.tensor(self.hot) * {f}",
    "({f} / (self.hot ** 2 + 1)).softmax({d})", "{f} * (self.step & 1)", "{f} * round(self.hot, 1)",
    "{f}.roll(self.step, {d})", "{f} * torch.arange({f}.shape[-1]).pow(self.step)",
]  # fmt: skip
COUNTED = [
    "self.step += 1", "self.hot *= 0.9", "self.hot = self.hot * 0.5 + 0.1",
    "self.step = self.step + 2", "self.hot = min(self.hot + 0.125, 0.9)", "self.step = 3",
    "self.hot = float(self.step)", "self.step = self.step % 4 + 1", "self.hot = 0.5",
    "if self.training:\n    self.step += 1",
]  # fmt: skip
HOOKS = [
    "{f}.register_hook(lambda gradient: gradient * 0.5)",
    "{f}.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))",
    "{f}.register_hook(lambda gradient: None)",
    "{v} = self.halved({f})", "{v} = self.moved({f})", "{v} = self.doubled({f})",
    "{v} = self.doubled(self.moved({f}) + {f})",
]  # fmt: skip
FUNCTIONS = [
    "WithPlace.apply({f})", "BetweenConstants.apply({f})", "OneSided.apply({f}, {g})",
    "Unfilled.apply({f})", "Unfilled.apply({f})[1]", "WithPlace.apply({f})[0]",
    "WithPlace.apply({f})[1]", "BetweenConstants.apply({f})[0]", "OneSided.apply({f}, {f})",
]  # fmt: skip
STATES = [
    "with torch.autocast('cpu', torch.bfloat16):\n    {v} = {f} @ {w:last, 4}",
    "with torch.autocast('cpu', torch.float16):\n    {v} = F.linear({f}, {w:5, last}, {w:5})",
    "with torch.autocast('cpu', enabled=False):\n    {v} = {f}.float() @ {w:last, 4}",
    "with torch.autocast('cpu', enabled=False):\n"
    "    {v} = F.layer_norm({f}.float() @ {w:last, 4}, (4,))",
    "with torch.autocast('cpu', enabled=False):\n"
    "    {v} = ({f}.float() @ {f}.float().mT).softmax(-1)",
    "with torch.autocast('cpu', torch.bfloat16):\n    {v} = {f} @ {w:last, 4}\n"
    "    with torch.autocast('cpu', enabled=False):\n        {v 2} = {v}.float() @ {w:4, 3}",
    "{v} = {f} @ {w:last, 4}", "{v} = F.linear({f}, {w:5, last}, {w:5}) @ {w:5, 3}",
    "with torch.inference_mode():\n    {v} = {f}.exp()",
    "with torch.no_grad():\n    {v} = {f} @ {w:last, 4}",
    "with torch.no_grad():\n    {v} = {f}.exp()\n    with torch.enable_grad():\n"
    "        {v 2} = {f} * {v}",
    "with torch.set_grad_enabled(self.training):\n    {v} = {f} * {g}",
    "if torch.is_grad_enabled():\n    {v} = {f} * 2\nelse:\n    {v} = {f} * 3",
    "if torch.is_autocast_enabled('cpu'):\n    {v} = {f} * 2\nelse:\n    {v} = {f} * 3",
    "{v} = {f} * torch.ones(()).to(torch.get_default_dtype())", "{v} = torch.ones(3) * 0.1",
    "{v} = torch.arange(0.0, 1.0, 0.3)", "{v} = torch.tensor([0.1, 0.2])",
]  # fmt: skip
LAYOUTS = [
    "{a}.expand(2, *{s})", "{a}.expand_as({b})", "{f}.unfold({d}, 2, 1)", "{f}.unfold({d}, 1, 1)",
    "{f}.permute(*range({f}.dim())[::-1])", "{f}.movedim(0, -1)", "{f}.mT.exp()",
    "{f}.contiguous(memory_format=torch.channels_last)", "{f}.unsqueeze(-1).expand(*{s}, 2)",
    "{f}.to(memory_format=torch.channels_last) * 2", "{f}.permute(*range({f}.dim())[::-1]) + {f}.T",
    "{f}.expand(2, *{s}).sin()", "{f}.mT.contiguous()", "{f}.as_strided({s}, {f}.stride())",
    "torch.empty_like({f}.mT).copy_({f}.mT)", "{f}.mT.clone()", "{f}[None].mT[0] * 2",
    "F.conv2d({f}.contiguous(memory_format=torch.channels_last), {w:3, second, 1, 1})",
    "torch.empty_strided((2, 3), (1, 2)).fill_({n})", "{f}.mT.to(torch.float64)", "{f}.diagonal()",
    "{f}.mT.reshape(-1)", "torch.einsum('...ij->...ji', {f})", "{f}.view_as({f}).mT.cumsum(-1)",
]  # fmt: skip
BLOCKS = [
    "with torch.no_grad():\n    {v} = {f}.exp() + {g}",
    "with torch.no_grad():\n    {v} = {f}.view(-1)",
    "with torch.enable_grad():\n    {v} = {f} * {g}",
    "with torch.autocast('cpu', torch.bfloat16):\n    {v} = {f} @ {w:last, 4}",
    "if self.training:\n    {v} = {f} * 2\nelse:\n    {v} = {f} * 3",
    "if {a}.shape[0] > 3:\n    {v} = {f} + 1\nelse:\n    {v} = {f} - 1",
    "{v} = checkpoint(lambda x: x.sin() * x.exp(), {f}, use_reentrant=False)",
    "{v} = {f}\nfor _ in range(3):\n    {v} = {v} * 0.5 + {g}", "{v} = sum([{f}, {g}, {h}])",
    "{v} = {f} * {f}.shape[0]", "{v} = {f} / {f}.shape[{d}] ** 0.5",
    "{v} = {f} * (1.0 / {f}.shape[{d}]) ** 0.5", "{v} = {f}.new_full(({f}.shape[{d}],), {n})",
    "{v} = torch.cond if False else {f}.cos()",
]  # fmt: skip

# How often lines of each kind are tried; a kind that follows many others may rarely fit.
KINDS = [
    (POINTWISE, 10), (ACTIVATIONS, 8), (BINARY, 16), (COMPARISONS, 4), (INTEGERS, 4),
    (REDUCTIONS, 12), (SHAPES, 16), (INDEXING, 6), (PRODUCTS, 8), (LAYERS, 7), (LOSSES, 5),
    (DTYPES, 4), (CREATED, 3), (RANDOM, 2), (WRITES, 8), (STATE, 3), (BLOCKS, 4),
]  # fmt: skip
# Kinds of which a program has few, if any.
EXTRA_KINDS = [
    (COMPLEX, 14), (MASKS, 6), (EDGES, 8), (NUMBERS, 8), (HOOKS, 4), (FUNCTIONS, 5), (STATES, 8),
    (LAYOUTS, 8),
]  # fmt: skip
# Kinds that are written with another one.
COMPANIONS = [(MASKS, MASKED_WRITES, 5), (NUMBERS, COUNTED, 3)]
STATEMENTS = [WRITES, MASKED_WRITES, COUNTED, HOOKS]
