"""Graphs of ours that between them have views, a border, unbacked sizes, and bodies."""

HEAD = '<ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1, "org.pytorch.aten" : 1]>'
VIEWS = """
    views (float[N,6] x, float[6,4] w, int64[N] label) => (float[M,2] y, float[] loss)
    <int64[2] target = {-1, 2}, int64[1] zero = {0}, int64[1] two = {2}, int64[1] one = {1}>
    {
        a = MatMul (x, w)
        b = Transpose <perm = [1, 0]> (a)
        c = Slice (b, zero, two, zero)
        d = Tanh (c)
        e = Reshape (c, target)
        f = Reshape (d, target)
        y = Add (e, f)
        g, h = Split <axis = 1, num_outputs = 2> (a)
        i = Unsqueeze (g, one)
        j = Squeeze (i, one)
        k = Softmax <axis = -1> (j)
        l = Gather <axis = 0> (k, label)
        m = Concat <axis = 1> (l, h)
        n = ReduceMean <keepdims = 0> (m)
        o = org.pytorch.aten.ATen <operator = "aten::erfc", overload_name = "",
                                   tensor_args = ["self"]> (n)
        loss = Identity (o)
    }
"""
TRAINING = """
    training (float[N,6] x, float[6] w) => (float[N,6] dx, float[6] dw)
    <int64[1] zero = {0}, int64[2] back = {-1, 6}, int64[1] flat = {-1}>
    {
        a = Mul (x, w)
        b = Sigmoid (a)
        c = Transpose <perm = [1, 0]> (b)
        s = ReduceSum <keepdims = 1> (b, zero)
        y = Reshape (c, flat)
        dy, ds = com.microsoft.YieldOp (y, s)
        t = Reshape (dy, back)
        u = Add (t, ds)
        v = Mul (u, b)
        z = Mul (c, c)
        q = Transpose <perm = [1, 0]> (z)
        dx = Add (v, q)
        p = Mul (v, x)
        dw = ReduceSum <keepdims = 0> (p, zero)
    }
"""
SIZES = """
    sizes (float[N,8] x, int64 count) => (float[A,B] y, int64[K] z, float[C,8] v)
    <int64[1] zero = {0}, int64[1] two = {2}, int64[1] rest = {-1},
     int64 one = {1}, int64 nil = {0}>
    {
        shape = Shape (x)
        rows = Gather (shape, zero)
        odd = Mod (rows, two)
        even = Sub (rows, odd)
        half = Div (even, two)
        target = Concat <axis = 0> (half, rest)
        a = Tanh (x)
        y = Reshape (a, target)
        numbers = Range (nil, count, one)
        z = Neg (numbers)
        wide = Unsqueeze (count, zero)
        eight = Mul (two, wide)
        b = ReduceSum <keepdims = 1> (a, zero)
        both = Concat <axis = 0> (wide, eight)
        v = Expand (b, both)
    }
"""
BRANCHES = """
    branches (int64 m, float[N,4] x, float[4] w) => (float[N,4] y, float[A,4] v, float[K,N] sums)
    <float half = {0.5}, float zero = {0}, int64[1] last = {1}>
    {
        a = Tanh (x)
        y, v, sums = Loop (m, , a, x) <
            body = body (int64 i, bool go, float[N,4] b, float[B,4] c)
                => (bool on, float[N,4] next, float[C,4] more, float[N] sum) {
                on = Identity (go)
                sum = ReduceSum <keepdims = 0> (b, last)
                total = ReduceSum <keepdims = 0> (sum)
                up = Greater (total, zero)
                next = If (up) <
                    then_branch = t () => (float[N,4] d) { e = Mul (b, half)  d = Sub (e, a) },
                    else_branch = f () => (float[N,4] g) { h = Exp (b)  g = Mul (h, w) }
                >
                more = Concat <axis = 0> (c, next)
            }
        >
    }
"""
TEXTS = {
    "views": HEAD + VIEWS,
    "training": HEAD + TRAINING,
    "sizes": HEAD + SIZES,
    "branches": HEAD + BRANCHES,
}
# Of each: sizes of floats, or the integers themselves.
INPUTS = {
    "branches": {"m": 3, "x": (2, 4), "w": (4,)},
    "sizes": {"x": (4, 8), "count": 4},
    "views": {"x": (3, 6), "w": (6, 4), "label": [0, 2, 1]},
    "training": {"x": (3, 6), "w": (6,), "dy": (18,), "ds": (1, 6)},
}
