"""Mistakes in texts of kernels: some that one would make, by hand, and many at random places."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# What one would do wrong -> case of kernel_cases.py, where it stands, what stands there instead.
# Places are regular expressions; each must be found. Where several are, all are changed.
_REDUCE = r"(?s)(INLINE wide reduce_row.*?)"
_PARTIAL = r"(?s)(INLINE void write_partial_sums.*?)"
_COLUMNS = r"(?s)(INLINE wide add_lines.*?)"
_ONE = r"(?s)(INLINE void finish_one.*?)"
_BLOCK = r"(?s)(INLINE wide sum_block.*?)"
_BARRIER = r"__syncthreads\(\);"
PLANTED: list[tuple[str, str, str, str]] = [
    # rows, columns, blocks
    ("a thread too many works on columns", "softmax", r"column >= columns", "column > columns"),
    ("rows that are not there are worked on", "softmax", r"!is_row \|\| ", ""),
    ("one row too many", "bias_dropout", r"row < last_row;", "row <= last_row;"),
    ("lines of threads have the same row", "softmax", r"line \+ threadIdx\.y", "line"),
    ("rows left out", "layer_norm_grad", r"line \+= 16", "line += 32"),
    ("rows done twice", "layer_norm_grad", r"line \+= 16", "line += 8"),
    ("every block has the same rows", "layer_norm_grad", r" \* rows_per_block", ""),
    ("groups begin behind each other's blocks", "channel_sums",
     r"remainder\(index_t\(block\), blocks_per_group, blocks_per_group_by\)", "index_t(block)"),
    ("groups do not end", "channel_sums", r"\(group \+ 1\) \* rows_of_group", "rows_of_group"),
    ("strips have the same columns", "dropout", r"strip \* \d+", "0"),
    ("vectors overlap", "layer_norm_grad_of_long_rows", r"threadIdx\.x\) \* 8", "threadIdx.x) * 4"),
    ("vectors of a thread overlap", "layer_norm_grad_of_long_rows", r"e \* \d+", "e * 32"),
    ("a thread has too few vectors", "layer_norm_grad_of_long_rows", r"e < \d;", "e < 1;"),
    ("a loop goes too slowly", "softmax_of_very_long_rows", r"(begin \+= )4096", r"\g<1>2048"),
    ("a loop goes too fast", "softmax_of_very_long_rows", r"(begin \+= )4096", r"\g<1>8192"),
    ("a loop ends with the last row's columns", "loss_of_very_long_cut_rows",
     r"last_column = columns \+ 4", "last_column = columns - 4"),
    ("rows begin with vectors", "softmax_of_cut_rows", r" - shift", ""),
    ("rows are shifted as the first", "softmax_of_cut_rows", r"row % 4 \*", "0 *"),
    ("elements before a row count", "softmax_of_cut_rows", r"u32\(place\) < u32\(end\)",
     "place < end"),
    ("elements behind a row count", "softmax_of_cut_rows",
     r"if \(!is_within\(column \+ i, columns\)\) continue", "if (column + i < 0) continue"),
    ("elements behind a row with a gap count", "loss_of_padded_rows",
     r"if \(column \+ i >= columns\) continue;", ""),
    ("elements before a row are written", "softmax_of_cut_rows",
     r"if \(is_within\(column \+ i, columns\)\) to", "if (column + i < columns) to"),
    ("elements behind a row are written", "softmax_of_cut_rows",
     r"column <= columns - V\) return store", "true) return store"),
    ("more threads than promised", "softmax", r"__launch_bounds__\(256\)",
     "__launch_bounds__(128)"),
    # operands
    ("stride of a row", "layer_norm_grad", r"row \* in1_row\)", "row * in0_row + row)"),
    ("no stride of a row", "layer_norm_grad", r"\(row \* in1_row\)", "(row)"),
    ("number of another row", "layer_norm_grad", r"in2\[row ", "in2[line "),
    ("numbers of the wrong columns", "layer_norm_grad", r"in4 \+ column", "in4 + first_column"),
    ("written in the wrong place", "bias_dropout", r"to0 \+ column", "to0 + first_column"),
    ("an address that is not aligned", "dropout", r"load\(v0, at0 \+ column",
     "load(v0, at0 + column + 1"),
    ("vectors where there are none", "strided", r"load_each\(v0, at0, .*\);",
     "load(v0, at0 + column);"),
    ("no stride of a column", "strided", r"\(column \+ i\) \* in\d_column", "(column + i)"),
    ("rest of a place in groups", "batch_norm", r"remainder\(row, in1", "quotient(row, in1"),
    ("a shift too far", "batch_norm", r"u32\(by >> 32\)", "u32(by >> 32) + 1"),
    ("a quotient of the factor alone", "batch_norm", r"u32\(by\)\) \+ u32\(number\)", "u32(by))"),
    ("parts of a result overlap", "strided", r"quotient\(column, out1_.*?\) \* out1_column0 \+ ",
     ""),
    ("no end of a run", "dropout", r"columns - column\)", "columns)"),
    ("one behind the end of a run", "dropout", r"if \(i < left\)", "if (i <= left)"),
    ("a whole vector at the end of a run", "dropout", r"left >= V\) return store",
     "left + 7 >= V) return store"),
    ("kept in the wrong place", "layer_norm_grad_of_long_rows", r"load\(v0\[e\]", "load(v0[0]"),
    ("columns kept in the wrong place", "layer_norm_grad_of_long_rows", r"load\(c4\[e\]",
     "load(c4[0]"),
    ("read for the wrong vector", "softmax_of_very_long_rows", r"load\(v0\[e\]", "load(v0[1 - e]"),
    ("short floats in the wrong order", "softmax_of_cut_short_floats", r"return pack\[i\]",
     "return pack[i ^ 1]"),
    # dtypes
    ("bfloat16 read as float16", "dropout", r"(widen\(bf16 x\).*)float_of_bf16", r"\1float_of_f16"),
    ("bfloat16 of the wrong bits", "dropout", r"u32\(bits\) << 16", "u32(bits) << 15"),
    ("truth of a byte", "strided", r"wide\(x\.byte != 0\)", "wide(x.byte == 0)"),
    ("a short sum along rows", "layer_norm_grad_of_long_rows", r"(r\d+) = (Sum::of\(\1, .*?)\);",
     r"\1 = ToBFloat16(\2));"),
    ("a short sum over rows", "layer_norm_grad", r"(sum\d\[e\]\[i\]) \+= (.*?);",
     r"\1 = ToBFloat16(\1 + \2);"),
    ("a short total", "loss", r"sum2 \+= (.*?);", r"sum2 = ToHalf(sum2 + \1);"),
    ("a double through float", "softmax_of_long_rows", r"Exp\((v\d+)\)", r"Exp(wide(float(\1)))"),
    # reductions
    ("sum from one", "softmax", r"(?s)(struct Sum \{.*?)wide\(0\)", r"\1wide(1)"),
    ("largest from zero", "softmax", r"return -infinity\(\)", "return wide(0)"),
    ("smallest from zero", "softmax", r"(?s)(struct Smallest \{.*?)infinity\(\)", r"\1wide(0)"),
    ("largest drops NaN", "softmax", r"x > y \|\| x != x \? x : y", "x > y ? x : y"),
    ("the first step of a shuffle", "softmax", r"\(TX < 32 \? TX : 32\) / 2",
     "(TX < 32 ? TX : 32) / 4"),
    ("the last step of a shuffle", "softmax", r"bits > 0", "bits > 1"),
    ("a lane is not in the mask", "softmax", r"0xFFFFFFFFu, x", "0x7FFFFFFFu, x"),
    ("a shuffle that some threads leave out", "softmax", r"(r\d+) = reduce_row",
     r"if (is_row) \1 = reduce_row"),
    ("a barrier that some threads leave out", "softmax_of_long_rows",
     r"if \(threadIdx\.x % 32 == 0\) of_row(.*)\n\s*__syncthreads",
     r"if (threadIdx.x % 32 != 0) __syncthreads(); else of_row\1\n__syncthreads"),
    ("warps write before others have read", "softmax_of_long_rows", _REDUCE + _BARRIER, r"\1"),
    ("warps read before others have written", "softmax_of_long_rows",
     _REDUCE + _BARRIER + "(.*?)" + _BARRIER, r"\1__syncthreads();\2"),
    ("warps that nobody adds", "softmax_of_long_rows", r"warp < TX / 32", "warp < TX / 32 - 1"),
    ("shared memory that nobody wrote", "softmax_of_long_rows", r"threadIdx\.x % 32 == 0",
     "threadIdx.x % 64 == 0"),
    ("lines share their numbers", "layer_norm_grad_of_wide_rows",
     r"shared \+ threadIdx\.y \* \(TX / 32\)", "shared"),
    ("an average of too many", "layer_norm_grad", r"wide\(columns\)", "wide(columns + 1)"),
    ("an average of other sizes", "channel_sums", r"(ratio\d+)\);", r"\1 + wide(0.001));"),
    # rows that are read across vectors
    ("across: as if rows began there", "dots", r"from - before \+ \(", "from + ("),
    ("across: the first vector twice", "dots", r"before == 0 \? 0 : V", "0"),
    ("across: rows as the first", "dots", r"const int before0 = .*;", "const int before0 = 0;"),
    ("across: other rows", "dots", r"row % 4 \* 1 % 4", "row % 4 * 3 % 4"),
    ("across: words stay", "dots", r"\(skipped & STEP\) != 0 \?", "false ?"),
    ("across: half of the words", "dots", r"skip_words<STEP / 2>\(words, skipped\)", ""),
    ("across: whole words", "dots_of_short_floats", r"before \* kBits % 32\)", "0)"),
    ("column sums: lines overlap", "column_dots", r"\) \* columns_of_sums, sum",
     ") * columns, sum"),
    # rows that are split
    ("strips: one row", "softmax_of_split_rows", r"i64\(row\) \* 3", "0 * 3"),
    ("strips: one reduction", "softmax_of_split_rows", r"\* 3 \+ 1\) \* strips",
     "* 3 + 0) * strips"),
    ("strips: one place", "softmax_of_split_rows", r"\[strip\] =", "[0] ="),
    ("strips: the same columns", "softmax_of_split_rows", r"strip \* columns_per_strip", "0"),
    ("strips: whole rows", "softmax_of_split_rows", r"min\(columns_per_strip, ", "("),
    ("strips: columns of the next row", "softmax_of_split_rows", r"column >= columns\) continue",
     "false) continue"),
    ("strips: no column behind the last vector", "loss_of_split_cut_rows",
     r"min\(columns_per_strip, columns \+ 4 - ", "min(columns_per_strip, columns - 4 - "),
    ("strips: some are left out", "softmax_of_split_rows", r"i < count; i \+= TX",
     "i < 1; i += TX"),
    ("strips: begin twice", "norm_dropout_of_split_rows", r"wide x = Op::start\(\)",
     "wide x = parts[0]"),
    ("strips: numbers of rows by all", "norm_dropout_of_split_rows", r" && first_column == 0\) sum",
     ") sum"),
    ("strips: a label out of bounds is nothing", "bad_labels_of_split_rows",
     r"if \(label\d+_but_minus_100 == kBad\) r", "if (false) r"),
    # sums over rows
    ("partial sums: read too early", "layer_norm_grad", _PARTIAL + _BARRIER + "(.*?)" + _BARRIER,
     r"\1__syncthreads();\2"),
    ("partial sums: a line is left out", "layer_norm_grad", _PARTIAL + r"y < TY", r"\1y < TY - 1"),
    ("partial sums: a line twice", "layer_norm_grad", _PARTIAL + r"y = 1", r"\1y = 0"),
    ("partial sums: elements share a place", "layer_norm_grad",
     _PARTIAL + r"threadIdx\.y \* V \+ i", r"\1threadIdx.y * V"),
    ("partial sums: written by all lines", "layer_norm_grad",
     r"threadIdx\.y == 0 && column < columns\) store", "column < columns) store"),
    ("partial sums: columns behind the end", "layer_norm_grad",
     r"threadIdx\.y == 0 && column < columns\) store", "threadIdx.y == 0) store"),
    ("partial sums of one block", "layer_norm_grad", r"\(block \* 2 ", "(0 * 2 "),
    ("partial sums of the other sum", "layer_norm_grad", r"\* 2 \+ 1\) \* columns",
     "* 2 + 0) * columns"),
    ("sums in memory that nobody wrote", "layer_norm_grad_of_very_long_rows",
     r"sum1\[column \+ i\] = wide\(0\);", ";"),
    ("finish: lines left out", "channel_sums_of_many", _COLUMNS + r"line \+= 8", r"\1line += 16"),
    ("finish: the last line", "layer_norm_grad", _COLUMNS + r"line < count", r"\1line < count - 1"),
    ("finish: read too early", "layer_norm_grad", _COLUMNS + _BARRIER, r"\1"),
    ("finish: nothing is shared", "layer_norm_grad",
     r"shared\[threadIdx\.y \* 32 \+ threadIdx\.x\] = sum;", ";"),
    ("finish: a line of threads", "channel_sums_of_many", _COLUMNS + r"y < 8", r"\1y < 7"),
    ("finish: columns behind the end", "layer_norm_grad", r"threadIdx\.y != 0 \|\| at >= columns",
     "threadIdx.y != 0"),
    ("finish: the first of all sums", "layer_norm_grad", r"i64\(blockIdx\.y\)", "i64(0)"),
    ("finish: by all lines", "layer_norm_grad", r"threadIdx\.y != 0 \|\| at", "at"),
    ("finish: the sum of the first group", "channel_sums", r"column_sums \+ group \* ",
     "column_sums + 0 * "),
    ("finish: into the first group", "channel_sums", r"\(group \* sum0_row\)", "(0)"),
    ("finish: blocks have the same columns", "layer_norm_grad", r"blockIdx\.x % parts \* 32", "0"),
    ("total: of one block", "loss", r"totals\[block \*", "totals[0 *"),
    ("total: the first of each", "loss", r"(totals\[.*?)\+ 1\]", r"\1+ 0]"),
    ("total: numbers of rows by all threads", "loss", r"is_row && threadIdx\.x == 0", "is_row"),
    ("total: lines that nobody adds", "loss", _BLOCK + r"y < TY", r"\1y < TY - 1"),
    ("total: the first line twice", "loss", _BLOCK + r"y = 1", r"\1y = 0"),
    ("total: read too early", "loss", _BLOCK + _BARRIER + "(.*?)" + _BARRIER,
     r"\1__syncthreads();\2"),
    ("total: written before it was read", "loss", _BLOCK + _BARRIER, r"\1"),
    ("finish one: only a part", "loss_of_many_rows", _ONE + r"line \+= 256", r"\1line += 512"),
    ("finish one: other numbers", "loss", _ONE + r"line \* stride", r"\1line"),
    # labels and tables
    ("labels in the wrong lane", "loss_grad", r"column \+ i == label", "column == label"),
    ("labels that count are ignored", "loss", r"label == ignored", "label != ignored"),
    ("the first label", "loss", r"label > wide\(-1\)", "label > wide(0)"),
    ("the last label", "loss", r"label < wide\(columns\)", "label < wide(columns - 1)"),
    ("a label's number from one lane", "loss",
     r"(r\d+) = reduce_row(<Sum, \d+>\(\1, shared\);\n\s*if \(label)", r"reduce_row\2"),
    ("rows of a table by their place", "embedding", r"id\d+ \* in", "row * in"),
    ("the first row of a table", "embedding", r"id >= 0", "id > 0"),
    ("the last row of a table", "embedding", r"id < rows\)", "id < rows - 1)"),
    ("ids of rows that are not there", "embedding", r"(id\d+) = is_row \? (.*) : index_t\(kBad\)",
     r"\1 = \2"),
    # random numbers
    ("the same counter for a vector", "dropout", r"element / 4 \+ i / 4", "element / 4"),
    ("words in another order", "dropout", r"at % 2 == 0", "at % 2 != 0"),
    ("words of single numbers", "bias_dropout", r"at < 2 \?", "at < 1 ?"),
    ("rows have one mask", "bias_dropout", r"u64\(row\) \* u64\(columns\) \+ ", ""),
    ("nine rounds", "dropout", r"round < 10", "round < 9"),
    ("a stream's low word", "dropout", r"x2 = u32\(stream\)", "x2 = 0"),
    ("a stream's high word", "bias_dropout", r"x3 = u32\(stream >> 32\)", "x3 = 0"),
    ("a seed's high word", "dropout", r"key1 = u32\(seed >> 32\)", "key1 = 0"),
    ("keys that stay", "dropout", r"key0 \+= 0x9E3779B9u;", ""),
    ("what is dropped is kept", "dropout", r"high\) < limit", "high) >= limit"),
    ("a limit of half a word", "dropout", r", (\d{9,10})u\);", r", u32(\1u / 2));"),
]  # fmt: skip

_COUNT = r"(?s)(INLINE void count\(.*?)"
_PLACE = r"(?s)(INLINE void place\(.*?)"
_BEFORE = r"(?s)(INLINE u32 sum_before.*?)"
_LINES = r"(?s)(INLINE void write_sum_of_lines.*?)"
_TABLE = r"(?s)(INLINE void write_table.*?)"
# The same for cases of embedding_cases.py and take_cases.py.
PLANTED_IN_SUMS: list[tuple[str, str, str, str]] = [
    # sorting
    ("ids below zero", "an id below", r"id >= 0 && ", ""),
    ("one id too many", "an id behind", r"id < i64\(rows\)\)", "id <= i64(rows))"),
    ("low words of ids", "an id far behind", r"i64 id = i64\((.*)\);", r"i32 id = \1;"),
    ("nothing is told", "an id behind", r"\*fault = kind;", ""),
    ("a bad id is the first row", "an id behind", r"return rows;", "return 0;"),
    ("all digits are the first", "tiles", r"key >> shift", "key"),
    ("ids again for the next digit", "tiles", r"from\.ids = nullptr;", ""),
    ("sorted by the digit before", "tiles", r"keys_of\(sorted, i - 1\)", "keys_of(sorted, i)"),
    ("counts that nobody made", "few", r"digits\.what & kCount", "digits.what == kCount"),
    ("digits of a bit less", "tiles", r"\(1u << bits\) - 1", "(1u << (bits - 1)) - 1"),
    ("a digit is left out", "tiles", r"i < digits\.end", "i < digits.end - 1"),
    ("count: ids left out", "tiles", r"at \+= kThreads", "at += 2 * kThreads"),
    ("count: numbers that nobody cleared", "few", _COUNT + _BARRIER, r"\1"),
    ("count: read too early", "tiles", _COUNT + _BARRIER + "(.*?)" + _BARRIER,
     r"\1__syncthreads();\2"),
    ("sum before: a lane left out", "tiles", _BEFORE + r"lane >= distance", r"\1lane > distance"),
    ("sum before: this one too", "tiles", r"return sum - x;", "return sum;"),
    ("sum before: read too early", "one digit", _BEFORE + _BARRIER, r"\1"),
    ("sum before: warps left out", "one digit", r"i < warp;", "i < warp - 1;"),
    ("place: the counts of this block", "blocks", r"block < blockIdx\.x", "block <= blockIdx.x"),
    ("place: the counts of one block", "blocks", r"counts\[block \* kBins", "counts[0 * kBins"),
    ("place: a tile is cleared too early", "tiles", _PLACE + _BARRIER, r"\1"),
    ("place: counted too early", "tiles", _PLACE + _BARRIER + "(.*?)" + _BARRIER,
     r"\1__syncthreads();\2"),
    ("place: summed too early", "tiles", r"(?s)(__syncwarp\(\);\n    \}\n    )__syncthreads\(\);",
     r"\1"),
    ("place: written too early", "tiles", r"(?s)(next\[bin\] = sum;.*?)__syncthreads\(\);", r"\1"),
    ("place: a round too early", "tiles", r"(rank\[round\] = .*\n\s*)__syncwarp\(\);", r"\1"),
    ("place: tiles begin again", "tiles", r"next\[bin\] = sum;", ""),
    ("place: a lane too many", "few", r"\(1u << lane\) - 1\)\);", "(2u << lane) - 1));"),
    ("place: a bit left out", "few", r"bit < digit\.bits;", "bit < digit.bits - 1;"),
    ("place: each lane counts", "few", r"is_there && below == 0", "is_there"),
    ("place: numbers stay", "tiles", r"numbers\[to\] = number\[round\];", "numbers[to] = to;"),
    ("place: behind the end", "few", r"if \(of_lane \+ round \* 32 >= share\.end\) continue;", ""),
    # sums
    ("find: the next one", "few", r"order\.keys\[middle\] < key", "order.keys[middle] <= key"),
    ("rows in their old order", "few", r"numbers\[first \+ i \* kStep\]", "u32(first + i * kStep)"),
    ("rows of other lines", "parts", r"numbers\[first \+ i \* kStep\]", "numbers[first + i]"),
    ("rows: a round too few", "parts", r"count - first \+ kStep - 1", "count - first"),
    ("parts in one slot", "parts that begin anywhere", r"places \* 2 \+ 1", "places * 2"),
    ("parts: of the places before", "parts", r"\(slot / 2 \+ 1\) \* kPart", "slot / 2 * kPart"),
    ("parts: of few rows", "whole parts", r"end - first_of_id <= kPart",
     "end - first_of_id <= 130"),
    ("parts: that begin a block", "parts", r"first_of_id > kPart\)", "first_of_id >= kPart)"),
    ("parts: rounded down", "parts that begin anywhere", r"\(inside - first_of_id \+ kPart - 1\)",
     "(inside - first_of_id)"),
    ("parts: longer than they are", "parts", r"< kPart \? end : first \+ kPart", "< 0 ? 0 : end"),
    ("parts: one too many", "whole parts", r"\(count \+ kPart - 1\) / kPart",
     "(count / kPart + 1)"),
    ("parts: of other lines", "parts", r"first \+ i \* kWarps", "first + i"),
    ("strips have the same columns", "strips", r"index_t\(strip\)", "index_t(0)"),
    ("parts: strips end early", "parts", r"from < work\.end", "from + 32 * V < work.end"),
    ("lines: written too early", "strips", _LINES + _BARRIER, r"\1"),
    ("lines: read too early", "parts", _LINES + _BARRIER + "(.*?)" + _BARRIER,
     r"\1__syncthreads();\2"),
    ("lines: one is left out", "parts", _LINES + r"line < kWarps", r"\1line < kWarps - 1"),
    ("lines: one twice", "parts", _LINES + r"line = 1", r"\1line = 0"),
    ("lines: vectors overlap", "parts", r"threadIdx\.y \* V \+ i\) \* 32", "threadIdx.y + i) * 32"),
    ("table: bounds that nobody wrote", "tiles", r"thread <= kRows", "thread < kRows"),
    ("table: bounds read too early", "tiles", _TABLE + _BARRIER, r"\1"),
    ("table: rows behind the end", "few", r"rows - first_row < kRows \? rows : ", ""),
    ("table: columns behind the end", "strips", r"columns - begin < width \? columns : ", ""),
    ("table: blocks have the same rows", "tiles", r"work\.group \* kRows", "0"),
    ("table: padding is not zero", "padding", r"row == padding \? 0 : ", ""),
    ("table: padding is summed", "padding", r" \|\| row == padding\)", ")"),
    ("table: rows of many by a warp", "parts", r"count <= kFew \|\|", "count <= 1000 ||"),
    ("table: vectors overlap", "strips", r"(from \+ index_t\(threadIdx\.x\)) \* V", r"\1"),
    ("table: a short sum", "bfloat16", r"sum\[j\] \+= x\[j\];",
     "sum[j] = ToBFloat16(sum[j] + x[j]);"),
    # places along a dim
    ("none counts from the end", "taken rows", r"if \(id < 0\) id \+= .*;", ""),
    ("all count from the end", "an id below", r"if \(id < 0\) id \+= .*;",
     "if (id < 0) id += rows;"),
    ("columns: a dim left out", "taken runs", r"from\.count - 1; i > 0", "from.count - 2; i > 0"),
    ("columns: not divided", "taken runs", r"column /= size;", ""),
    ("columns: lie as in the table", "taken of transposed", r"columns\.from\.strides\[i\]",
     "columns.to[i]"),
    ("columns: lie as in x", "taken of transposed", r"\* columns\.to\[i\]",
     "* columns.from.strides[i]"),
    ("columns: of the first dim", "taken columns", r"columns\.to\[0\];",
     "columns.from.strides[0];"),
    ("rows as if they were a run", "taken runs", r"columns\.to_row", "columns.from.strides[0]"),
    ("blocks: groups of strips", "taken in strips", r"blockIdx\.x % groups", "blockIdx.x / strips"),
    ("blocks: the same strip", "taken in strips", r"blockIdx\.x / groups", "0"),
    ("parts: of other columns", "taken often", r"(i64\(work\.group\) \* columns) \+ column", r"\1"),
]  # fmt: skip


# Changes that no result can show, and why. A place is looked for in what is said of one.
HARMLESS = {
    r"in: if \(left >= V\)": "both ways give the same",
    r"in: .* Pack \{|'8' becomes '9' in: wide v": "of accesses: the gate looks at it",
    r"in: if \(threadIdx\.x % 32 == 0\) of_row": "all lanes of a warp have the same number",
    r"in: if \(threadIdx\.x == 0 && threadIdx\.y == 0\)": "all threads have the same sum",
    r"in: sum\d? = sum_block<": "a width that is shuffled and summed in the same way",
    r"'<' becomes '<=' in: INLINE wide Min|'>' becomes '>=' in: INLINE wide Max": "equal numbers",
    r"'<' becomes '<=' in: .* i < left \? widen": "what is read behind the end goes nowhere",
    r"in: if \(column >= columns\) continue;": "columns behind the end are read and go nowhere",
    r"in2_row_size1 \* in2_row0": "images have the same numbers: the stride is 0",
    r"blockIdx\.x % strips": "there is one strip",
    r" < limit\)": "no number is the limit",
}


@dataclass(frozen=True)
class Mutant:
    """The text of a case with a mistake: in a line, a part of which is another."""

    case: str
    what: str
    text: str
    line: str = ""
    new_line: str = ""

    def elsewhere(self, case: str, text: str) -> Mutant | None:
        """Give the text of another case with the same mistake, if it has such a line."""
        if case == self.case or f"\n{self.line}\n" not in text:
            return None
        changed = text.replace(f"\n{self.line}\n", f"\n{self.new_line}\n")
        return Mutant(case, self.what, changed, self.line, self.new_line)


def planted_in_sums(
    texts: Callable[[str], dict[str, str]],
) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Give what was planted, the case, and those of its texts that have the mistake."""
    for what, case, old, new in PLANTED_IN_SUMS:
        changed = {name: re.sub(old, new, text) for name, text in texts(case).items()}
        changed = {name: text for name, text in changed.items() if text != texts(case)[name]}
        assert changed, f"{what}: {case} has no '{old}'"
        yield what, case, changed


def planted(texts: Callable[[str], str]) -> Iterator[Mutant]:
    """Give texts with the mistakes above; `texts` gives that of a case."""
    for what, case, old, new in PLANTED:
        text, changes = re.subn(old, new, texts(case))
        assert changes, f"{what}: {case} has no '{old}'"
        yield Mutant(case, what, text)


# What may stand at the place of a token; what is not here stays.
_OTHERS = {
    "+": "-*",
    "-": "+",
    "*": "+",
    "/": "*%",
    "%": "/*",
    "<": ("<=", ">"),
    "<=": "<",
    ">": (">=", "<"),
    ">=": ">",
    "==": ("!=",),
    "!=": ("==",),
    "&&": ("||",),
    "||": ("&&",),
    "+=": ("-=", "="),
    "row": ("line", "first_row"),
    "line": ("row", "first_row"),
    "column": ("first_column", "row"),
    "columns": ("rows_per_block", "(columns - 1)"),
    "first_column": ("column",),
    "last_row": ("first_row",),
    "x": ("y",),
    "y": ("x",),
    "i": ("0",),
    "e": ("0",),
    "Sum": ("Largest",),
    "Largest": ("Smallest", "Sum"),
    "Smallest": ("Largest",),
    "Add": ("Sub",),
    "Sub": ("Add",),
    "Mul": ("Add", "Div"),
    "Div": ("Mul",),
    "Exp": ("Tanh",),
    "Tanh": ("Erf",),
    "Gelu": ("GeluTanh", "Relu"),
    "Relu": ("Neg",),
    "Sqrt": ("Copy",),
    "Log": ("Exp",),
    "Neg": ("Copy",),
    "Where": ("MulAdd",),
    "Greater": ("Less",),
    "Equal": ("Less",),
    "rows_of_group": ("rows_per_block",),
    "blocks_per_group": ("strips",),
    "is_row": ("true",),
    "group": ("0",),
    "block": ("group",),
    "threadIdx": ("blockIdx",),
    "blockIdx": ("threadIdx",),
    "true": ("false",),
    "u64": ("u32",),
    "stride": ("count",),
    "count": ("stride",),
    "float": ("bf16",),
    "bf16": ("f16", "float"),
    "f16": ("bf16",),
    "boolean": ("i8",),
    "kIgnored": ("kBad",),
    "left": ("V",),
    "TX": ("TY",),
    "TY": ("TX",),
    "element": ("counter",),
    "seed": ("stream",),
    "stream": ("seed",),
    "label": ("ignored",),
    "key0": ("key1",),
    "key1": ("key0",),
    "x0": ("x1",),
    "x1": ("x0",),
    "x2": ("x3",),
    "x3": ("x2",),
}
_TOKEN = re.compile(
    r"//[^\n]*|#[^\n]*|\b0x[0-9A-F]+u?\b|\b[0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?[fu]?(?:ull|u)?\b"
    r"|\b\w+\b|\+=|[<>=!]=|&&|\|\||<<|>>|->|::|\+\+|--|[-+*/%<>]|\S"
)
_STATEMENT = re.compile(
    r"^\s*((?:\w+\(.*\)|[\w\[\] +.]+ [-+*/]?= .*|break|return [^;]*);)$", re.MULTILINE
)


def at_random(case: str, text: str, count: int, seed: int) -> Iterator[Mutant]:
    """Give texts in each of which one place is changed: a token, or a statement left out."""
    places = list(_places(text))
    for at, token, new in random.Random(f"{case} {seed}").sample(places, min(count, len(places))):
        begin, end = text.rindex("\n", 0, at) + 1, text.index("\n", at)
        line = text[begin:end]
        new_line = line[: at - begin] + new + line[at - begin + len(token) :]
        what = f"'{token}' becomes '{new}' in: {line.strip()}"
        yield Mutant(case, what, text[:begin] + new_line + text[end:], line, new_line)


def _places(text: str) -> Iterator[tuple[int, str, str]]:
    for begin, end in _code(text):
        names = set(re.findall(r"\b(?:in|v|r|s|c|sum|out|to|at)\d+\b", text[begin:end]))
        for match in _TOKEN.finditer(text, begin, end):
            token = match.group()
            if token.startswith(("//", "#")):
                continue
            for new in _instead_of(token, names):
                yield match.start(), token, new
        for match in _STATEMENT.finditer(text[begin:end]):
            yield begin + match.start(1), match.group(1), ";"


def _instead_of(token: str, names: set[str]) -> Iterator[str]:
    if token in _OTHERS:
        yield from _OTHERS[token]
    elif token in names:
        kind = token.rstrip("0123456789")
        others = (name for name in names if name != token and name.rstrip("0123456789") == kind)
        yield from sorted(others)[:2]
    elif re.fullmatch(r"[0-9]+", token):
        yield str(int(token) + 1)
        if int(token) > 1:
            yield str(int(token) // 2)
    elif re.fullmatch(r"[0-9]+\.[0-9]+(?:e[+-]?[0-9]+)?", token):
        yield str(1.5 * float(token) + 0.25)
    elif re.fullmatch(r"0x[0-9A-F]+u?", token):
        yield f"0x{int(token.rstrip('u'), 16) >> 1:X}u"


def _code(text: str) -> list[tuple[int, int]]:
    """Give where the kernels stand, and what they use of the prelude."""
    start = text.index('extern "C"')
    found, used = [(start, len(text))], set(re.findall(r"\w+", text[start:]))
    waiting = list(_definitions(text[:start]))
    while reached := [each for each in waiting if each[0] in used]:
        waiting = [each for each in waiting if each not in reached]
        for _, begin, end in reached:
            found.append((begin, end))
            used |= set(re.findall(r"\w+", text[begin:end]))
    return sorted(found)


def _definitions(prelude: str) -> Iterator[tuple[str, int, int]]:
    """Give names and places of functions and types, but for those of the emulator alone."""
    of_processor = prelude.index("#ifdef EMULATED_CUDA"), prelude.index("#endif")
    begin = at = 0
    head = ""
    for line in prelude.splitlines(keepends=True):
        if line.startswith(("template", "INLINE", "struct")):
            begin, head = (at, line) if not head.startswith("template") else (begin, line)
        at += len(line)
        if head and re.search(r"^\};?$|\}$", line.rstrip()) and not line.startswith("  "):
            name = re.search(r"struct (?:__align__\(.*\) )?(\w+)|(\w+)\(", head)
            if name and not of_processor[0] < begin < of_processor[1]:
                yield name.group(1) or name.group(2), begin, at
            head = ""
