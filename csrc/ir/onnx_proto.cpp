#include "ir/onnx_proto.h"

#include "base/error.h"
#include "ir/edit.h"
#include "ir/external_data.h"

#include "onnx_torch_ort.pb.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace torch_ort::ir {

namespace {

namespace proto = ::torch_ort_onnx;

constexpr const char* kProducer = "torch_ort";
constexpr int64_t kOtherDomainVersion = 1;

// Keys in metadata_props of what ONNX cannot represent.
constexpr const char* kStrides = "strides";
constexpr const char* kDevice = "device";
constexpr const char* kParameter = "parameter";
constexpr const char* kOrigin = "origin";
constexpr const char* kRecompute = "recompute";
constexpr const char* kCheckpoint = "checkpoint";
constexpr const char* kSymbolInputs = "symbol_inputs";

template <typename What, typename Got, typename Want>
[[noreturn]] void raise(const What& what, const Got& got, const Want& want) {
  throw UserError(concat("onnx: ", what, ": got ", got, ", want ", want));
}

// --- writing -------------------------------------------------------------------------------------

// The lowest version of the format that supports the opset, as ONNX's releases combine them.
// Versions before 4 require that each initializer is also a graph input.
int64_t ir_version_for(int64_t opset) {
  static constexpr std::pair<int64_t, int64_t> kNewestOpset[] = {
      {9, 4}, {10, 5}, {11, 6}, {14, 7}, {18, 8}, {20, 9}, {22, 10}, {23, 11}, {24, 12}, {27, 13}};
  for (auto [newest, version] : kNewestOpset) {
    if (opset <= newest) return version;
  }
  return 14;
}

template <typename Message>
void add_metadata(Message& message, const char* key, std::string value) {
  auto& entry = *message.add_metadata_props();
  entry.set_key(key);
  entry.set_value(std::move(value));
}

// The shortest decimal of the largest float is greater than it if it is read as a double.
bool fits_in_float(double value) {
  static const double largest = widen(std::numeric_limits<float>::max());
  return !std::isfinite(value) || std::abs(value) <= largest;
}

float narrow(double value) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  return static_cast<float>(std::isfinite(value) ? std::clamp(value, -kLargest, kLargest) : value);
}

// Whether a FLOAT attribute, which has 32 bits, is read back as the same number.
bool survives_as_float(double value) {
  return std::isnan(value) || (fits_in_float(value) && widen(narrow(value)) == value);
}

class Writer {
 public:
  explicit Writer(const OnnxWriteOptions& options) : options_(options) {}

  OnnxBytes write(const Graph& graph) {
    proto::ModelProto model;
    model.set_ir_version(ir_version_for(options_.opset));
    model.set_producer_name(kProducer);
    write_graph(graph, *model.mutable_graph());
    auto& standard = *model.add_opset_import();
    standard.set_domain("");
    standard.set_version(options_.opset);
    for (const std::string& domain : domains_) {
      auto& import = *model.add_opset_import();
      import.set_domain(domain);
      import.set_version(kOtherDomainVersion);
    }
    const size_t num_bytes = model.ByteSizeLong();
    if (num_bytes > std::numeric_limits<int32_t>::max()) {
      throw Unsupported(concat("onnx: model: got ", num_bytes, " bytes, want less than 2 GiB; ",
                               "give an external path for the data"));
    }
    OnnxBytes bytes{model.SerializeAsString(), std::move(external_)};
    ORT_CHECK(bytes.model.size() == num_bytes, "onnx: model: protobuf wrote ", bytes.model.size(),
              " bytes, want ", num_bytes);
    return bytes;
  }

 private:
  void write_graph(const Graph& graph, proto::GraphProto& out) {
    out.set_name(graph.name);
    for (const Value* input : graph.inputs) write_value(*input, *out.add_input());
    for (const Value* value : graph.initializers) {
      if (value->data) {
        write_tensor(value->data, value->name, *out.add_initializer());
      } else {
        auto& input = *out.add_input();
        write_value(*value, input);
        add_metadata(input, kParameter, "1");
      }
    }
    for (const Node& node : graph.nodes) {
      if (!node.is_erased()) write_node(node, *out.add_node());
    }
    for (const Value* output : graph.outputs) write_value(*output, *out.add_output());
    write_inner_types(graph, out);
    if (!graph.symbol_inputs.empty()) {
      std::string symbols;
      for (const std::string& symbol : graph.symbol_inputs) {
        if (!symbols.empty()) symbols += ',';
        symbols += symbol;
      }
      add_metadata(out, kSymbolInputs, symbols);
    }
  }

  void write_inner_types(const Graph& graph, proto::GraphProto& out) {
    const std::unordered_set<const Value*> outputs(graph.outputs.begin(), graph.outputs.end());
    for (const Node& node : graph.nodes) {
      for (const Value* value : node.outputs) {
        if (value && value->type != Type() && !outputs.contains(value)) {
          write_value(*value, *out.add_value_info());
        }
      }
    }
    for (const Value* value : graph.initializers) {
      const Type& type = value->type;
      if (value->data && (type.strides || type.device != Device()) && !outputs.contains(value)) {
        write_value(*value, *out.add_value_info());
      }
    }
  }

  void write_value(const Value& value, proto::ValueInfoProto& out) {
    out.set_name(value.name);
    const Type& type = value.type;
    if (type.dtype != DType::kUndefined) {
      auto& tensor = *out.mutable_type()->mutable_tensor_type();
      tensor.set_elem_type(static_cast<int32_t>(type.dtype));
      if (type.shape) write_shape(*type.shape, *tensor.mutable_shape());
    }
    if (type.strides) add_metadata(out, kStrides, to_string(*type.strides));
    if (type.device != Device()) add_metadata(out, kDevice, to_string(type.device));
  }

  void write_shape(const Shape& shape, proto::TensorShapeProto& out) {
    for (const Dim& dim : shape) {
      auto& written = *out.add_dim();
      if (dim.is_constant()) {
        written.set_dim_value(dim.constant());
      } else {
        written.set_dim_param(dim.str());
      }
    }
  }

  void write_tensor(const std::shared_ptr<const TensorData>& data, const std::string& name,
                    proto::TensorProto& out) {
    out.set_name(name);
    out.set_data_type(static_cast<int32_t>(data->dtype));
    for (int64_t dim : data->shape) out.add_dims(dim);
    if (options_.external_path.empty() || data->num_bytes < options_.external_threshold) {
      out.set_raw_data(data->bytes, data->num_bytes);
      return;
    }
    out.set_data_location(proto::TensorProto::EXTERNAL);
    auto add_entry = [&](const char* key, std::string value) {
      auto& entry = *out.add_external_data();
      entry.set_key(key);
      entry.set_value(std::move(value));
    };
    add_entry("location", options_.external_path);
    add_entry("offset", std::to_string(external_.add(data)));
    add_entry("length", std::to_string(data->num_bytes));
  }

  void write_node(const Node& node, proto::NodeProto& out) {
    out.set_name(node.name);
    out.set_op_type(node.op.name);
    if (!node.op.domain.empty()) {
      out.set_domain(node.op.domain);
      domains_.insert(node.op.domain);
    }
    for (const Value* input : node.inputs) out.add_input(input ? input->name : "");
    for (const Value* output : node.outputs) out.add_output(output ? output->name : "");
    for (const auto& [name, attr] : node.attrs) {
      auto& written = *out.add_attribute();
      written.set_name(name);
      std::visit([&](const auto& value) { write_attr(value, node, written); }, attr);
    }
    if (!node.origin.empty()) {
      add_metadata(out, kOrigin, node.origin);
      // Viewers of models show this.
      out.set_doc_string(node.origin);
    }
    if (!node.recompute.empty()) add_metadata(out, kRecompute, node.recompute);
    if (node.checkpoint >= 0) add_metadata(out, kCheckpoint, std::to_string(node.checkpoint));
  }

  // These ops define their attributes as FLOAT. Other domains are read only by this engine.
  static bool wants_float(const Node& node) {
    return node.op.domain.empty() || node.op.domain == kMicrosoftDomain;
  }

  static float checked_float(double value, const Node& node, const proto::AttributeProto& out) {
    if (!fits_in_float(value)) {
      throw Unsupported(concat("onnx: attribute '", out.name(), "' of node '", node.name, "': got ",
                               decimal_text(value), ", want a number of 32 bits"));
    }
    return narrow(value);
  }

  void write_attr(const Dim& dim, const Node&, proto::AttributeProto& out) {
    if (dim.is_constant()) {
      out.set_type(proto::AttributeProto::INT);
      out.set_i(dim.constant());
    } else {
      out.set_type(proto::AttributeProto::STRING);
      out.set_s(dim.str());
    }
  }

  void write_attr(double value, const Node& node, proto::AttributeProto& out) {
    if (wants_float(node) || survives_as_float(value)) {
      out.set_type(proto::AttributeProto::FLOAT);
      out.set_f(checked_float(value, node, out));
    } else {
      out.set_type(proto::AttributeProto::STRING);
      out.set_s(decimal_text(value));
    }
  }

  void write_attr(const std::string& text, const Node&, proto::AttributeProto& out) {
    out.set_type(proto::AttributeProto::STRING);
    out.set_s(text);
  }

  void write_attr(const Shape& dims, const Node&, proto::AttributeProto& out) {
    const bool are_known = is_constant(dims);
    out.set_type(are_known ? proto::AttributeProto::INTS : proto::AttributeProto::STRINGS);
    for (const Dim& dim : dims) {
      if (are_known) {
        out.add_ints(dim.constant());
      } else {
        out.add_strings(dim.str());
      }
    }
  }

  void write_attr(const std::vector<double>& values, const Node& node, proto::AttributeProto& out) {
    const bool as_floats =
        wants_float(node) || std::all_of(values.begin(), values.end(), survives_as_float);
    out.set_type(as_floats ? proto::AttributeProto::FLOATS : proto::AttributeProto::STRINGS);
    for (double value : values) {
      if (as_floats) {
        out.add_floats(checked_float(value, node, out));
      } else {
        out.add_strings(decimal_text(value));
      }
    }
  }

  void write_attr(const std::vector<std::string>& texts, const Node&, proto::AttributeProto& out) {
    out.set_type(proto::AttributeProto::STRINGS);
    for (const std::string& text : texts) out.add_strings(text);
  }

  void write_attr(const std::shared_ptr<const TensorData>& data, const Node&,
                  proto::AttributeProto& out) {
    out.set_type(proto::AttributeProto::TENSOR);
    write_tensor(data, "", *out.mutable_t());
  }

  void write_attr(const std::shared_ptr<Graph>& graph, const Node&, proto::AttributeProto& out) {
    out.set_type(proto::AttributeProto::GRAPH);
    write_graph(*graph, *out.mutable_g());
  }

  const OnnxWriteOptions& options_;
  std::set<std::string> domains_;
  ExternalContent external_;
};

// --- reading tensors -----------------------------------------------------------------------------

// Whether Python decodes the bytes as text: no overlong forms, no surrogates.
bool is_utf8(std::string_view text) {
  auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0; };
  size_t i = 0;
  while (i < text.size()) {
    const int first = byte(i), second = byte(i + 1);
    int num_more;
    bool is_good = true;
    if (first < 0x80) {
      num_more = 0;
    } else if (first >= 0xC2 && first <= 0xDF) {
      num_more = 1;
    } else if (first >= 0xE0 && first <= 0xEF) {
      num_more = 2;
      is_good = !(first == 0xE0 && second < 0xA0) && !(first == 0xED && second > 0x9F);
    } else if (first >= 0xF0 && first <= 0xF4) {
      num_more = 3;
      is_good = !(first == 0xF0 && second < 0x90) && !(first == 0xF4 && second > 0x8F);
    } else {
      return false;
    }
    for (int k = 1; k <= num_more; ++k) is_good = is_good && (byte(i + k) & 0xC0) == 0x80;
    if (!is_good) return false;
    i += num_more + 1;
  }
  return true;
}

const std::string& checked_name(const std::string& name, const char* what) {
  if (!is_utf8(name)) raise(what, concat("'", name, "'"), "UTF-8 text");
  return name;  // NOLINT(bugprone-return-const-ref-from-parameter): nobody gives it a temporary
}

int64_t integer_from(const std::string& text, const std::string& what) {
  int64_t value = 0;
  auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || stop != text.data() + text.size() || value < 0) {
    raise(what, concat("'", text, "'"), "an integer from 0 up");
  }
  return value;
}

template <typename Message>
const std::string* find_metadata(const Message& message, const char* key) {
  for (const auto& entry : message.metadata_props()) {
    if (entry.key() == key) return &checked_name(entry.value(), key);
  }
  return nullptr;
}

// Converts the values of a typed field to the narrower elements that they stand for.
template <typename Element, typename Field>
void narrow_elements(const Field& field, std::byte* out, const std::string& what) {
  for (int i = 0; i < field.size(); ++i) {
    const auto element = static_cast<Element>(field[i]);
    if (!std::in_range<Element>(field[i])) {
      raise(what, field[i], concat("values of ", 8 * sizeof(Element), " bits"));
    }
    std::memcpy(out + i * sizeof(Element), &element, sizeof(Element));
  }
}

class TensorReader {
 public:
  TensorReader(const proto::TensorProto& tensor, const std::string& name, ExternalFiles& files)
      : tensor_(tensor), name_(name), files_(files), what_(concat("data of tensor '", name, "'")) {}

  std::shared_ptr<const TensorData> read() {
    read_type();
    if (tensor_.has_segment()) raise(what_, "a segment", "a whole tensor");
    if (tensor_.data_location() == proto::TensorProto::EXTERNAL) return external_data();
    std::vector<std::byte> bytes;
    if (tensor_.has_raw_data()) {
      const std::string& raw = tensor_.raw_data();
      check_count(raw.size(), num_bytes_, "bytes");
      bytes.resize(raw.size());
      if (!raw.empty()) std::memcpy(bytes.data(), raw.data(), raw.size());
    } else {
      bytes = typed_data();
    }
    check_bools(bytes.data());
    return make_tensor_data(dtype_, shape_, std::move(bytes));
  }

 private:
  void read_type() {
    const int32_t number = tensor_.data_type();
    if (number < 1 || number > static_cast<int32_t>(DType::kFloat8E5M2FNUZ) ||
        number == static_cast<int32_t>(DType::kString)) {
      raise(what_, concat("data type ", number), "a type of numbers, 1 to 20 and not 8");
    }
    dtype_ = static_cast<DType>(number);
    num_elements_ = 1;
    bool fits = true;
    for (int64_t dim : tensor_.dims()) {
      if (dim < 0) raise(what_, concat("a dim of ", dim), "dims from 0 up");
      fits = fits && !__builtin_mul_overflow(num_elements_, dim, &num_elements_);
      shape_.push_back(dim);
    }
    fits = fits && !__builtin_mul_overflow(num_elements_, size_bytes(dtype_), &num_bytes_);
    if (!fits) raise(what_, "dims whose product is too large", "a tensor that fits in memory");
  }

  void check_count(size_t got, int64_t want, const char* unit) const {
    if (got != static_cast<size_t>(want)) {
      raise(what_, concat(got, " ", unit), concat(want, " for ", name(dtype_), shape_text()));
    }
  }

  std::string shape_text() const { return to_string(Shape(shape_.begin(), shape_.end())); }

  // In C++ a byte of a bool must be 0 or 1.
  void check_bools(const std::byte* bytes) const {
    if (dtype_ != DType::kBool) return;
    for (int64_t i = 0; i < num_bytes_; ++i) {
      const int value = std::to_integer<int>(bytes[i]);
      if (value > 1) raise(what_, concat("the bool ", value), "0 or 1");
    }
  }

  template <typename Element, typename Field>
  std::vector<std::byte> copied(const Field& field, int64_t num_per_element = 1) const {
    check_count(field.size(), num_elements_ * num_per_element, "values");
    std::vector<std::byte> bytes(num_bytes_);
    if (num_bytes_ > 0) std::memcpy(bytes.data(), field.data(), num_bytes_);
    return bytes;
  }

  template <typename Element, typename Field>
  std::vector<std::byte> narrowed(const Field& field) const {
    check_count(field.size(), num_elements_, "values");
    std::vector<std::byte> bytes(num_bytes_);
    narrow_elements<Element>(field, bytes.data(), what_);
    return bytes;
  }

  std::vector<std::byte> typed_data() const {
    switch (dtype_) {
      case DType::kFloat: return copied<float>(tensor_.float_data());
      case DType::kComplex64: return copied<float>(tensor_.float_data(), 2);
      case DType::kDouble: return copied<double>(tensor_.double_data());
      case DType::kComplex128: return copied<double>(tensor_.double_data(), 2);
      case DType::kInt64: return copied<int64_t>(tensor_.int64_data());
      case DType::kUInt64: return copied<uint64_t>(tensor_.uint64_data());
      case DType::kUInt32: return narrowed<uint32_t>(tensor_.uint64_data());
      case DType::kInt32: return copied<int32_t>(tensor_.int32_data());
      case DType::kInt16: return narrowed<int16_t>(tensor_.int32_data());
      case DType::kInt8: return narrowed<int8_t>(tensor_.int32_data());
      case DType::kUInt16:
      case DType::kHalf:
      case DType::kBFloat16: return narrowed<uint16_t>(tensor_.int32_data());
      default: return narrowed<uint8_t>(tensor_.int32_data());
    }
  }

  std::shared_ptr<const TensorData> external_data() const {
    std::string location;
    int64_t offset = 0, length = num_bytes_;
    for (const auto& entry : tensor_.external_data()) {
      if (entry.key() == "location") location = checked_name(entry.value(), "location");
      if (entry.key() == "offset") offset = integer_from(entry.value(), what_ + ", offset");
      if (entry.key() == "length") length = integer_from(entry.value(), what_ + ", length");
    }
    check_count(length, num_bytes_, "bytes");
    std::vector<std::byte> bytes = files_.read(location, offset, num_bytes_, name_);
    check_bools(bytes.data());
    return make_tensor_data(dtype_, shape_, std::move(bytes));
  }

  const proto::TensorProto& tensor_;
  const std::string& name_;
  ExternalFiles& files_;
  const std::string what_;
  DType dtype_ = DType::kUndefined;
  std::vector<int64_t> shape_;
  int64_t num_elements_ = 0;
  int64_t num_bytes_ = 0;
};

// --- reading graphs ------------------------------------------------------------------------------

using Versions = std::map<std::string, int64_t>;

// The standard domain has two spellings.
std::string domain_of(const std::string& domain) {
  return domain == "ai.onnx" ? std::string() : checked_name(domain, "domain");
}

// Reads a graph. A subgraph may refer to names that its outer graphs have defined so far.
class GraphReader {
 public:
  GraphReader(const Versions& versions, ExternalFiles& files, const GraphReader* outer)
      : versions_(versions), files_(files), outer_(outer), graph_(std::make_unique<Graph>()) {}

  std::unique_ptr<Graph> read(const proto::GraphProto& in) {
    if (!in.name().empty()) graph_->name = checked_name(in.name(), "name of a graph");
    if (in.sparse_initializer_size() > 0) {
      raise(concat("graph '", graph_->name, "'"), "a sparse initializer", "dense ones");
    }
    for (const auto& info : in.value_info()) note_type(info);
    for (const auto& info : in.output()) note_type(info);
    read_inputs(in);
    for (const auto& tensor : in.initializer()) read_initializer(tensor);
    for (const auto& node : in.node()) read_node(node);
    for (const auto& info : in.output()) {
      add_output(*graph_, *find(info.name(), concat("output of graph '", graph_->name, "'")));
    }
    if (const std::string* symbols = find_metadata(in, kSymbolInputs)) read_symbols(*symbols);
    return std::move(graph_);
  }

 private:
  void read_inputs(const proto::GraphProto& in) {
    std::unordered_set<std::string> initialized;
    for (const auto& tensor : in.initializer()) initialized.insert(tensor.name());
    for (const auto& info : in.input()) {
      // An input with a default becomes a constant. Before version 4 each initializer is also an
      // input.
      if (initialized.contains(info.name())) continue;
      define(info.name(), "input");
      values_[info.name()] = &add_input(*graph_, info.name(), read_type(info));
    }
  }

  void read_initializer(const proto::TensorProto& tensor) {
    define(tensor.name(), "initializer");
    auto data = TensorReader(tensor, tensor.name(), files_).read();
    Type type{data->dtype, Shape(data->shape.begin(), data->shape.end()), std::nullopt, Device()};
    if (auto noted = types_.find(tensor.name()); noted != types_.end()) {
      check_rank(noted->second.strides, type.shape->size(), tensor.name());
      type.strides = noted->second.strides;
      type.device = noted->second.device;
    }
    values_[tensor.name()] =
        &add_initializer(*graph_, tensor.name(), std::move(type), std::move(data));
  }

  // Checks a name that is about to be given to a value.
  void define(const std::string& name, const char* kind) const {
    const std::string what = concat("name of an ", kind, " of graph '", graph_->name, "'");
    checked_name(name, what.c_str());
    if (name.empty()) raise(what, "''", "a name");
    if (values_.contains(name) || is_visible_outside(name)) {
      raise(what, concat("'", name, "' again"), "a name that no other value has");
    }
  }

  bool is_visible_outside(const std::string& name) const {
    return outer_ && (outer_->values_.contains(name) || outer_->is_visible_outside(name));
  }

  // The value with a name that is read. For a name of an outer graph a value is added that stands
  // for it.
  Value* find(const std::string& name, const std::string& reader) {
    if (auto found = values_.find(name); found != values_.end()) return found->second;
    if (!is_visible_outside(name)) {
      raise(reader, concat("'", name, "'"), "a value that is defined before");
    }
    Value& captured = add_value(*graph_, name, {});
    values_[name] = &captured;
    return &captured;
  }

  void note_type(const proto::ValueInfoProto& info) { types_[info.name()] = read_type(info); }

  Type read_type(const proto::ValueInfoProto& info) const {
    const std::string what = concat("type of value '", info.name(), "'");
    Type type;
    if (info.has_type() && info.type().value_case() != proto::TypeProto::VALUE_NOT_SET) {
      if (!info.type().has_tensor_type()) raise(what, "no tensor", "a tensor");
      const auto& tensor = info.type().tensor_type();
      const int32_t number = tensor.elem_type();
      if (number < 0 || number > static_cast<int32_t>(DType::kFloat8E5M2FNUZ)) {
        raise(what, concat("element type ", number), "one from 1 to 20");
      }
      type.dtype = static_cast<DType>(number);
      if (tensor.has_shape()) type.shape = read_shape(tensor.shape(), what);
    }
    if (const std::string* strides = find_metadata(info, kStrides)) {
      type.strides = parse_shape(*strides);
      if (type.shape) check_rank(type.strides, type.shape->size(), info.name());
    }
    if (const std::string* device = find_metadata(info, kDevice)) {
      type.device = device_from_text(*device);
    }
    return type;
  }

  static void check_rank(const std::optional<Shape>& strides, size_t rank,
                         const std::string& name) {
    if (!strides || strides->size() == rank) return;
    raise(concat("type of value '", name, "'"), concat(strides->size(), " strides"), rank);
  }

  // A dim without a number or a name makes the whole shape unknown.
  std::optional<Shape> read_shape(const proto::TensorShapeProto& in,
                                  const std::string& what) const {
    Shape shape;
    for (const auto& dim : in.dim()) {
      if (dim.has_dim_value()) {
        if (dim.dim_value() < 0)
          raise(what, concat("a dim of ", dim.dim_value()), "dims from 0 up");
        shape.push_back(dim.dim_value());
      } else if (!dim.dim_param().empty()) {
        shape.push_back(Dim::parse(dim.dim_param()));
      } else {
        return std::nullopt;
      }
    }
    return shape;
  }

  void read_node(const proto::NodeProto& in) {
    OpId op{domain_of(in.domain()), checked_name(in.op_type(), "op of a node")};
    std::string name = checked_name(in.name(), "name of a node");
    for (const std::string& output : in.output()) {
      if (name.empty()) name = output;
    }
    if (op.name.empty()) raise(concat("op of node '", name, "'"), "''", "a name");
    if (!in.overload().empty()) {
      raise(concat("node '", name, "'"), concat("the function overload '", in.overload(), "'"),
            "an op");
    }
    check_version(op, name);

    const std::string reader = concat("input of node '", name, "'");
    std::vector<Value*> inputs;
    for (const std::string& input : in.input()) {
      inputs.push_back(input.empty() ? nullptr : find(input, reader));
    }
    Attrs attrs;
    for (const auto& attribute : in.attribute()) {
      const std::string what = concat("attribute '", attribute.name(), "' of node '", name, "'");
      checked_name(attribute.name(), "name of an attribute");
      if (attribute.name().empty()) raise(what, "no name", "a name");
      if (!attrs.emplace(attribute.name(), read_attr(attribute, what, op.domain)).second) {
        raise(what, "it twice", "it once");
      }
    }
    std::vector<Value*> outputs;
    for (const std::string& output : in.output()) {
      outputs.push_back(output.empty() ? nullptr : new_output(output));
    }
    Node& node = append_producer(*graph_, std::move(op), std::move(inputs), std::move(outputs),
                                 std::move(attrs), name);
    read_tags(in, node);
  }

  Value* new_output(const std::string& name) {
    define(name, "output of a node");
    auto noted = types_.find(name);
    Value& value = add_value(*graph_, name, noted == types_.end() ? Type() : noted->second);
    values_[name] = &value;
    return &value;
  }

  void check_version(const OpId& op, const std::string& node) const {
    auto found = versions_.find(op.domain);
    const std::string what = concat("opset of the domain '", op.domain, "' of node '", node, "'");
    if (found == versions_.end()) raise(what, "none", "an import");
    if (!op.domain.empty() && found->second != kOtherDomainVersion) {
      raise(what, found->second, kOtherDomainVersion);
    }
  }

  void read_tags(const proto::NodeProto& in, Node& node) const {
    if (const std::string* origin = find_metadata(in, kOrigin)) node.origin = *origin;
    if (const std::string* recompute = find_metadata(in, kRecompute)) node.recompute = *recompute;
    if (const std::string* checkpoint = find_metadata(in, kCheckpoint)) {
      const std::string what = concat("checkpoint of node '", node.name, "'");
      const int64_t number = integer_from(*checkpoint, what);
      if (!std::in_range<int>(number)) raise(what, number, "a number of 32 bits");
      node.checkpoint = static_cast<int>(number);
    }
  }

  Attr read_attr(const proto::AttributeProto& in, const std::string& what,
                 const std::string& domain) {
    if (!in.ref_attr_name().empty()) raise(what, "a reference of a function", "a value");
    switch (in.type()) {
      case proto::AttributeProto::INT: return Dim(in.i());
      case proto::AttributeProto::FLOAT: return widen(in.f());
      case proto::AttributeProto::STRING: return in.s();
      case proto::AttributeProto::INTS: return Shape(in.ints().begin(), in.ints().end());
      case proto::AttributeProto::FLOATS: {
        std::vector<double> values;
        for (float value : in.floats()) values.push_back(widen(value));
        return values;
      }
      case proto::AttributeProto::STRINGS:
        return std::vector<std::string>(in.strings().begin(), in.strings().end());
      case proto::AttributeProto::TENSOR: return TensorReader(in.t(), in.name(), files_).read();
      case proto::AttributeProto::GRAPH: {
        // A subgraph of the engine's own ops reads nothing from outside, and has names of its own.
        const GraphReader* outer = domain == kTorchOrtDomain ? nullptr : this;
        return std::shared_ptr<Graph>(GraphReader(versions_, files_, outer).read(in.g()));
      }
      default:
        raise(what, concat("type ", static_cast<int>(in.type())),
              "an integer, float, string, tensor or graph");
    }
  }

  void read_symbols(const std::string& text) {
    for (const Dim& symbol : parse_shape(concat("[", text, "]"))) {
      if (!symbol.is_symbol()) raise("symbol inputs", concat("'", symbol.str(), "'"), "symbols");
      graph_->symbol_inputs.push_back(symbol.name());
    }
  }

  const Versions& versions_;
  ExternalFiles& files_;
  const GraphReader* outer_;
  std::unique_ptr<Graph> graph_;
  std::unordered_map<std::string, Value*> values_;
  std::unordered_map<std::string, Type> types_;
};

Versions read_versions(const proto::ModelProto& model) {
  Versions versions;
  for (const auto& import : model.opset_import()) {
    const std::string domain = domain_of(import.domain());
    const std::string what = concat("opset of the domain '", domain, "'");
    if (import.version() < 1) raise(what, import.version(), "a version from 1 up");
    auto [entry, is_new] = versions.emplace(domain, import.version());
    if (!is_new && entry->second != import.version()) {
      raise(what, concat(entry->second, " and ", import.version()), "one version");
    }
  }
  return versions;
}

}  // namespace

OnnxBytes to_onnx(const Graph& graph, const OnnxWriteOptions& options) {
  if (options.opset < 1) raise("opset", options.opset, "a version from 1 up");
  return Writer(options).write(graph);
}

void save_onnx(const Graph& graph, const std::string& path, int64_t opset, size_t external_limit) {
  size_t num_bytes = 0;
  for (const Value* value : graph.initializers) {
    if (value->data) num_bytes += value->data->num_bytes;
  }
  OnnxWriteOptions options{.opset = opset};
  const std::string data_path = path + ".data";
  if (num_bytes > external_limit) {
    options.external_path = std::filesystem::path(data_path).filename().string();
  }
  const OnnxBytes bytes = to_onnx(graph, options);
  if (!bytes.external.is_empty()) bytes.external.write(data_path);
  write_file(path, bytes.model);
}

std::unique_ptr<Graph> from_onnx(std::string_view bytes, const std::string& directory) {
  if (bytes.size() > std::numeric_limits<int32_t>::max()) {
    raise("model", concat(bytes.size(), " bytes"), "less than 2 GiB");
  }
  proto::ModelProto model;
  if (bytes.empty() || !model.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) {
    raise("model", concat(bytes.size(), " bytes that are no ModelProto"), "an ONNX model");
  }
  if (!model.has_graph()) raise("model", "no graph", "an ONNX model with one");
  if (model.functions_size() > 0) {
    raise("model", concat(model.functions_size(), " functions"), "none; inline them first");
  }
  if (model.training_info_size() > 0) raise("model", "training info", "a graph alone");
  const Versions versions = read_versions(model);
  ExternalFiles files(directory);
  std::unique_ptr<Graph> graph = GraphReader(versions, files, nullptr).read(model.graph());
  if (auto standard = versions.find(""); standard != versions.end()) {
    graph->opset = standard->second;
  }
  return graph;
}

}  // namespace torch_ort::ir
