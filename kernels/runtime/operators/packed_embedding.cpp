// PackedEmbedding(ids, mask, position_ids, type_ids?, codes, scale, positions, types?, gamma, beta,
// hot_place?, hot_codes?, hot_scale?): the output is (B, T, width).
#include "../active.h"
#include "../embedding.h"
#include "operator.h"

namespace mrem::runtime {
namespace {

// Rows of the tables: what ids are checked against.
struct Rows {
    std::int64_t vocabulary, positions, types;  // types is 0 if the model has none
};

struct Tables {
    EmbeddingShape shape;
    Rows rows;
};

enum Place : std::size_t {
    kIds,
    kMask,
    kPositionIds,
    kTypeIds,
    kCodes,
    kScale,
    kPositions,
    kTypes,
    kGamma,
    kBeta,
    kHotPlace,
    kHotCodes,
    kHotScale
};

std::int64_t rows_of(const Tensor& table) { return table.dims[0]; }

void read_hot_rows(const Node& node, std::int64_t vocabulary, std::int64_t width, EmbeddingShape& shape) {
    if (!node.has_constant(kHotPlace)) {
        if (node.has_constant(kHotCodes) || node.has_constant(kHotScale)) {
            node.refuse("input 10 (hot_place) must be an initializer of the file, as there are hot rows");
        }
        return;
    }
    const Tensor codes =
        node.constant(kHotCodes, "hot_codes", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, {kAnyLength, width});
    shape.hot_codes = codes.as<std::int8_t>();
    shape.hot_scale = node.floats(kHotScale, "hot_scale", {rows_of(codes)});
    const Tensor place =
        node.constant(kHotPlace, "hot_place", ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED, {vocabulary});
    if (place.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8) {
        shape.hot_place8 = place.as<std::uint8_t>();
    } else if (place.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16) {
        shape.hot_place16 = place.as<std::uint16_t>();
    } else {
        node.refuse("input 10 (hot_place) must be uint8 or uint16");
    }
    for (std::int64_t i = 0; i < vocabulary; ++i) {
        const std::int64_t row = shape.hot_place8 != nullptr ? shape.hot_place8[i] : shape.hot_place16[i];
        if (row >= rows_of(codes)) {
            node.refuse("input 10 (hot_place) sends token " + std::to_string(i) + " to row " +
                        std::to_string(row) + " of a table with " + std::to_string(rows_of(codes)));
        }
    }
}

Tables read_tables(const Node& node) {
    Tables tables{};
    EmbeddingShape& shape = tables.shape;
    Rows& rows = tables.rows;
    const Tensor scale = node.constant(kScale, "scale", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, {kAnyLength});
    const Tensor gamma = node.constant(kGamma, "gamma", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, {kAnyLength});
    const std::int64_t width = rows_of(gamma);
    rows.vocabulary = rows_of(scale);
    shape.width = static_cast<std::size_t>(width);
    node.grid_of_codes("", shape.bits, shape.spacing, shape.low);
    shape.epsilon = node.epsilon();
    shape.codes = node.constant(kCodes, "codes", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
                                {rows.vocabulary, static_cast<std::int64_t>(shape.row_bytes())})
                      .as<std::uint8_t>();
    shape.scale = scale.as<float>();
    shape.gamma = gamma.as<float>();
    shape.beta = node.floats(kBeta, "beta", {width});
    const Tensor positions =
        node.constant(kPositions, "positions", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, {kAnyLength, width});
    shape.positions = positions.as<float>();
    rows.positions = rows_of(positions);
    if (node.has_constant(kTypes)) {
        const Tensor types =
            node.constant(kTypes, "types", ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, {kAnyLength, width});
        shape.types = types.as<float>();
        rows.types = rows_of(types);
    }
    read_hot_rows(node, rows.vocabulary, width, shape);
    return tables;
}

class EmbeddingKernel {
  public:
    static constexpr const char* kName = "PackedEmbedding";
    static constexpr Port kInputs[] = {
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},           {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},           {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, true},
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},           {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},           {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, true},
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},           {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED, true},  // uint8 or uint16
        {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, true},      {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, true},
    };

    explicit EmbeddingKernel(const Node& node) : EmbeddingKernel(read_tables(node)) {}

    void compute(const Call& call, Pool& pool) const {
        constexpr auto kInt64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
        const Tensor ids = call.input(kIds, "ids", kInt64), mask = call.input(kMask, "mask", kInt64);
        const Tensor position_ids = call.input(kPositionIds, "position_ids", kInt64);
        const Tensor type_ids = call.optional_input(kTypeIds, "type_ids", kInt64);
        if (ids.dims.size() != 2) {
            call.refuse("input 0 (ids) has shape " + shown(ids.dims) + ", expected [batch, tokens]");
        }
        require_shape(call, kMask, "mask", mask.dims, ids.dims);
        const std::vector<std::int64_t> one = {1, ids.dims[1]};
        const bool shared = position_ids.dims == one;
        if (!shared) require_shape(call, kPositionIds, "position_ids", position_ids.dims, ids.dims);
        const bool typed = type_ids.type == kInt64;
        if (typed) require_shape(call, kTypeIds, "type_ids", type_ids.dims, ids.dims);
        if (typed && rows_.types == 0) call.refuse("input 3 (type_ids) is given, but the model has no types");

        const std::vector<std::int64_t> dims = {ids.dims[0], ids.dims[1], static_cast<std::int64_t>(width_)};
        elements(dims);
        float* y = call.output(dims);
        const std::size_t total = elements(ids.dims);
        if (total == 0) return;
        const auto tokens = static_cast<std::size_t>(ids.dims[1]);
        const auto* real = mask.as<std::int64_t>();
        require_rows(call, "ids", ids.as<std::int64_t>(), real, total, total, rows_.vocabulary);
        require_rows(call, "position_ids", position_ids.as<std::int64_t>(), real, total,
                     shared ? tokens : total, rows_.positions);
        if (typed)
            require_rows(call, "type_ids", type_ids.as<std::int64_t>(), real, total, total, rows_.types);
        embedding_.run(ids.as<std::int64_t>(), real, position_ids.as<std::int64_t>(), shared,
                       type_ids.as<std::int64_t>(), total / tokens, tokens, pool, y);
    }

  private:
    explicit EmbeddingKernel(const Tables& tables)
        : rows_(tables.rows), width_(tables.shape.width), embedding_(tables.shape, active_floats()) {}

    static void require_shape(const Call& call, std::size_t index, const char* name,
                              const std::vector<std::int64_t>& dims,
                              const std::vector<std::int64_t>& expected) {
        if (dims == expected) return;
        call.refuse("input " + std::to_string(index) + " (" + name + ") has shape " + shown(dims) +
                    ", expected " + shown(expected));
    }

    // Every id of a real token is a row of its table. `ids` repeats after `count` tokens.
    static void require_rows(const Call& call, const char* name, const std::int64_t* ids,
                             const std::int64_t* mask, std::size_t total, std::size_t count,
                             std::int64_t rows) {
        for (std::size_t i = 0; i < total; ++i) {
            const std::int64_t id = ids[i % count];
            if (mask[i] == 0 || (id >= 0 && id < rows)) continue;
            call.refuse(std::string(name) + " has the value " + std::to_string(id) +
                        ", which is not in 0 to " + std::to_string(rows - 1));
        }
    }

    Rows rows_;
    std::size_t width_;
    Embedding embedding_;
};

}  // namespace

const OrtCustomOp* new_packed_embedding(std::size_t threads) {
    return new Operator<EmbeddingKernel>(threads);
}

}  // namespace mrem::runtime
