// A model's forward pass as a list of operations, run in one call over one flat hybrid batch by a team of threads.
//
// The list is made once, from Python, where a model's file says what its layers are (../program.py mirrors the structures
// here). One call per iteration leaves nothing of the interpreter between two products, and its lock to other threads.

#include <memory>

#include "attend.h"
#include "linear.h"
#include "multiply.h"
#include "rows.h"
#include "simd.h"
#include "team.h"

namespace legato {

enum Kind : int32_t { kEmbed = 0, kLinear = 1, kRotateAndStore = 2, kAttend = 3, kGather = 4 };

struct Embed {
  const void* weights;  // packed, one output per token of the vocabulary
  const float* scales;  // int8 only
  float* output;
  float multiplier;
  int32_t weight_type, hidden_size;
};

struct Linear {
  const float* input;
  int64_t input_stride;  // elements, as all strides
  float* output;
  int64_t output_stride;
  const void* weights;
  const float* scales;  // by output, int8 only
  const float* bias;    // by output, or null
  const float* norm;    // null: the input as it is; else its RMS norm with these weights
  float eps;
  int32_t inputs, outputs, weight_type, epilogue;
};

struct RotateAndStore {
  float* projected;  // (tokens, stride): queries, keys and values of a token side by side; queries are turned in place
  int64_t stride;
  const float* cosine;  // (positions, head_dim / 2)
  const float* sine;
  const float* query_norm;  // by dimension of a head, or null
  const float* key_norm;
  float eps;
  KvPool pool;
  AttentionShape shape;
};

struct Attend {
  const float* queries;
  int64_t query_stride;
  float* output;
  int64_t output_stride;
  KvPool pool;
  AttentionShape shape;
};

struct Gather {  // The rows of sampled tokens.
  const float* input;
  float* output;
  int64_t input_stride, output_stride, size;
};

struct Operation {
  int32_t kind;
  int32_t is_sampled_rows;  // whether it runs on the sampled rows, gathered, rather than on all tokens
  union {
    Embed embed;
    Linear linear;
    RotateAndStore rotate_and_store;
    Attend attend;
    Gather gather;
  };
};

struct Batch {
  int32_t num_tokens, num_rows, num_sampled, table_stride;
  const int64_t* token_ids;
  const int64_t* positions;
  const int64_t* slots;
  const int64_t* sampled;       // indices into the batch
  const int32_t* query_lens;    // by row
  const int32_t* kv_lens;       // by row, with the tokens being computed
  const int64_t* block_tables;  // (rows, table_stride)
};

constexpr int kTileRows = 48;             // Rows that one tile of attention takes through the keys at a time.
constexpr int kTilesPerThread = 4;         // With fewer large tiles they are split into parts, too, to share them out evenly.
constexpr int64_t kChunkBytes = 64 << 10;  // Of weights read for few rows: some microseconds between looks at the ticket.
constexpr int64_t kRowsBytes = 512 << 10;  // Of rows that meet all panels before the next: they stay in second-level cache.
constexpr int kTokensPerChunk = 8;         // Of operations on single tokens.

// A tile and the keys that it goes through: all of them, or one part, whose result is merged later.
struct Item {
  Tile tile;
  int start, end;
  int64_t partial;  // where the part's result goes; -1: the item finishes its rows itself
};

struct Merge {
  Tile tile;
  int64_t first_partial;
  int num_parts;
};

class Run : public Job {
 public:
  Run(const Operation* operations, int num_operations, const Batch& batch, Team& team, std::vector<float>& memory,
      int64_t* operation_ns)
      : operations_(operations), batch_(batch), num_threads_(team.num_threads()), operation_ns_(operation_ns) {
    int64_t thread_floats = 0, shared_floats = 0;
    for (int i = 0; i < num_operations; ++i) add_stages(i, thread_floats, shared_floats);
    thread_floats = (thread_floats + 31) / 16 * 16;  // Cache lines are not shared between threads.
    const int64_t total = shared_floats + partial_floats_ + num_threads_ * thread_floats + 16;
    if ((int64_t)memory.size() < total) memory.resize(total);
    shared_ = (float*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    partials_ = shared_ + shared_floats;
    threads_ = partials_ + partial_floats_;
    thread_floats_ = thread_floats;
    laid_out_.assign(num_threads_, -1);
    last_ns_ = Team::now_ns();
  }

  void run_chunk(int stage, int chunk, int thread) override {
    const Stage& it = stages_[stage];
    const Operation& operation = operations_[it.operation];
    switch (operation.kind) {
      case kEmbed: return embed_tokens(operation.embed, chunk);
      case kLinear:
        return it.is_first ? lay_out(operation.linear, it, chunk) : multiply(operation.linear, it, stage, chunk, thread);
      case kRotateAndStore: return rotate_tokens(operation.rotate_and_store, chunk);
      case kAttend: return it.is_first ? attend(operation.attend, chunk, thread) : merge(operation.attend, chunk, thread);
      case kGather: return gather(operation.gather, chunk);
    }
  }

  void on_stage_done(int stage) override {
    if (!operation_ns_) return;
    const int64_t now = Team::now_ns();
    operation_ns_[stages_[stage].operation] += now - last_ns_;
    last_ns_ = now;
  }

 private:
  struct Stage {
    int operation;
    bool is_first;  // of two: laying rows out before multiplying, parts before merging
    RowBlocks blocks;
    int panels_per_chunk, blocks_per_chunk, chunks_per_row_group;
  };

  void add_stages(int index, int64_t& thread_floats, int64_t& shared_floats) {
    const Operation& operation = operations_[index];
    const int rows = operation.is_sampled_rows ? batch_.num_sampled : batch_.num_tokens;
    const auto add = [&](bool is_first, int count, RowBlocks blocks = RowBlocks(0, 1), int panels = 1, int grouped = 1,
                         int chunks = 1) {
      stages_.push_back({index, is_first, blocks, panels, grouped, chunks});
      num_chunks.push_back(count);
    };
    switch (operation.kind) {
      case kLinear: {
        const Linear& linear = operation.linear;
        const RowBlocks blocks(rows, most_rows(linear.weight_type));
        const int64_t row_floats = (int64_t)num_slabs(linear.inputs) * kSlab;
        const int panels = num_panels(linear.outputs, linear.epilogue);
        if (blocks.num_blocks <= 1) {
          // Each thread lays the few rows out for itself, which costs less than waiting for another to do it.
          thread_floats = std::max(thread_floats, row_floats * blocks.block_rows);
          const int together = panels_at_once(linear.weight_type, rows);
          const int64_t most = kChunkBytes / panel_bytes(linear.inputs, linear.weight_type);
          const int per_chunk = (int)std::max<int64_t>(1, most / together) * together;
          add(false, rows ? (panels + per_chunk - 1) / per_chunk : 0, blocks, per_chunk, 1, 0);
        } else {
          shared_floats = std::max(shared_floats, row_floats * rows);
          const int64_t block_bytes = row_floats * blocks.block_rows * (is_by_pairs(linear.weight_type) ? 2 : 4);
          const int grouped = (int)std::clamp<int64_t>(kRowsBytes / block_bytes, 1, blocks.num_blocks);
          add(true, blocks.num_blocks, blocks);
          add(false, panels * ((blocks.num_blocks + grouped - 1) / grouped), blocks, 1, grouped, panels);
        }
        break;
      }
      case kAttend:
        if (items_.empty()) plan_attention(operation.attend.shape);
        thread_floats = std::max(thread_floats, AttentionScratch::size(max_tile_rows_, operation.attend.shape.head_dim));
        add(true, (int)items_.size());
        add(false, (int)merges_.size());
        break;
      case kGather: add(true, batch_.num_sampled); break;
      default: add(true, (rows + kTokensPerChunk - 1) / kTokensPerChunk);
    }
  }

  // All layers share the plan: which tiles there are, and which are split into parts. Models with layers of several
  // shapes or windows differ only in what a tile skips.
  void plan_attention(const AttentionShape& shape) {
    const int group = shape.group();
    const int max_queries = std::max(1, kTileRows / group);
    const auto is_large = [&](int queries) { return queries * group > kTileRows / 4; };
    int64_t num_large_tiles = 0;
    for (int row = 0; row < batch_.num_rows; ++row)
      if (is_large(batch_.query_lens[row]))
        num_large_tiles += (int64_t)(batch_.query_lens[row] + max_queries - 1) / max_queries * shape.num_kv_heads;
    const bool has_few_large_tiles = num_large_tiles < kTilesPerThread * num_threads_;
    int first_token = 0;
    for (int row = 0; row < batch_.num_rows; ++row) {
      const int query_len = batch_.query_lens[row], kv_len = batch_.kv_lens[row];
      const int64_t* table = batch_.block_tables + (int64_t)row * batch_.table_stride;
      for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head)
        for (int begin = 0; begin < query_len; begin += max_queries) {
          const int end = std::min(query_len, begin + max_queries);
          const int position = kv_len - query_len + begin;
          const Tile tile{first_token + begin, end - begin, position, table, kv_head};
          const int tile_rows = (end - begin) * group;
          const int num_keys = position + end - begin;
          const int num_parts = (num_keys + kPartKeys - 1) / kPartKeys;
          max_tile_rows_ = std::max(max_tile_rows_, tile_rows);
          if (num_parts == 1 || (is_large(end - begin) && !has_few_large_tiles)) {
            items_.push_back({tile, 0, num_keys, -1});
            continue;
          }
          merges_.push_back({tile, partial_floats_, num_parts});
          for (int part = 0; part < num_parts; ++part) {
            items_.push_back({tile, part * kPartKeys, std::min(num_keys, (part + 1) * kPartKeys), partial_floats_});
            partial_floats_ += (int64_t)tile_rows * part_size(shape.head_dim);
          }
        }
      first_token += query_len;
    }
    // The longest come first, so that none of them is left for the end.
    const auto work = [](const Item& item) { return (int64_t)item.tile.num_queries * (item.end - item.start); };
    std::stable_sort(items_.begin(), items_.end(), [&](const Item& a, const Item& b) { return work(a) > work(b); });
  }

  void embed_tokens(const Embed& embed, int chunk) {
    for (int token = chunk * kTokensPerChunk; token < std::min(batch_.num_tokens, (chunk + 1) * kTokensPerChunk); ++token)
      legato::embed(embed.weights, embed.scales, embed.weight_type, embed.hidden_size, batch_.token_ids[token],
                    embed.multiplier, embed.output + (int64_t)token * embed.hidden_size);
  }

  float* thread_memory(int thread) { return threads_ + thread * thread_floats_; }

  void lay_out(const Linear& linear, const Stage& stage, int block) {
    const int first = block * stage.blocks.block_rows;
    lay_out_rows(linear.input + first * linear.input_stride, linear.input_stride, stage.blocks.rows_of(block), linear.inputs,
                 linear.norm, linear.eps, linear.weight_type, shared_ + (int64_t)first * num_slabs(linear.inputs) * kSlab);
  }

  void multiply(const Linear& linear, const Stage& stage, int stage_index, int chunk, int thread) {
    const int64_t bytes = panel_bytes(linear.inputs, linear.weight_type);
    const int64_t row_floats = (int64_t)num_slabs(linear.inputs) * kSlab;
    const float* rows = shared_;
    int first_block = 0, panel = chunk * stage.panels_per_chunk;
    if (stage.chunks_per_row_group == 0) {
      rows = thread_memory(thread);
      if (laid_out_[thread] != stage_index) {
        lay_out_rows(linear.input, linear.input_stride, stage.blocks.num_rows, linear.inputs, linear.norm, linear.eps,
                     linear.weight_type, thread_memory(thread));
        laid_out_[thread] = stage_index;
      }
    } else {
      first_block = chunk / stage.chunks_per_row_group * stage.blocks_per_chunk;
      panel = chunk % stage.chunks_per_row_group;
    }
    const int last_panel = std::min(panel + stage.panels_per_chunk, num_panels(linear.outputs, linear.epilogue));
    const int last_block = std::min(first_block + stage.blocks_per_chunk, stage.blocks.num_blocks);
    while (panel < last_panel) {
      const int together = std::min(panels_at_once(linear.weight_type, stage.blocks.block_rows), last_panel - panel);
      for (int block = first_block; block < last_block; ++block) {
        const int first = block * stage.blocks.block_rows, count = stage.blocks.rows_of(block);
        PanelSums sums[kMostPanels];
        legato::multiply(linear.weight_type, count, together == 1, (const char*)linear.weights + panel * bytes, bytes,
                         rows + first * row_floats, num_slabs(linear.inputs), sums);
        for (int index = 0; index < together; ++index)
          for (int row = 0; row < count; ++row)
            write_row(linear, panel + index, sums[index][row], linear.output + (first + row) * linear.output_stride);
      }
      panel += together;
    }
  }

  static void write_row(const Linear& linear, int panel, Vector (&sums)[kVectors], float* output) {
    if (linear.scales || linear.bias) scale_and_shift(linear, panel, sums);
    if (linear.epilogue == kSiluMul) {
      const int first = panel * kLanes;
      write_lanes(output + first, silu(sums[0]) * sums[1], linear.outputs / 2 - first, false);
      return;
    }
    for (int v = 0; v < kVectors; ++v) {
      const int first = panel * kPanel + v * kLanes;
      write_lanes(output + first, sums[v], linear.outputs - first, linear.epilogue == kAdd);
    }
  }

  static void scale_and_shift(const Linear& linear, int panel, Vector (&sums)[kVectors]) {
    for (int column = 0; column < kPanel; ++column) {
      const int row = source_row(panel, column, linear.outputs, linear.epilogue);
      if (row < 0) continue;
      float& sum = ((float*)&sums[column / kLanes])[column % kLanes];
      if (linear.scales) sum *= linear.scales[row];
      if (linear.bias) sum += linear.bias[row];
    }
  }

  void rotate_tokens(const RotateAndStore& it, int chunk) {
    const AttentionShape& shape = it.shape;
    const int head_dim = shape.head_dim;
    for (int token = chunk * kTokensPerChunk; token < std::min(batch_.num_tokens, (chunk + 1) * kTokensPerChunk); ++token) {
      const float* cosine = it.cosine + batch_.positions[token] * (head_dim / 2);
      const float* sine = it.sine + batch_.positions[token] * (head_dim / 2);
      float* queries = it.projected + token * it.stride;
      float* keys = queries + shape.num_heads * head_dim;
      const float* values = keys + shape.num_kv_heads * head_dim;
      for (int head = 0; head < shape.num_heads + shape.num_kv_heads; ++head) {
        const float* norm = head < shape.num_heads ? it.query_norm : it.key_norm;
        if (norm) scale_head(queries + head * head_dim, head_dim, norm, it.eps);
        rotate(queries + head * head_dim, head_dim, cosine, sine);
      }
      for (int head = 0; head < shape.num_kv_heads; ++head)
        (it.pool.is_bfloat16 ? store_kv<uint16_t> : store_kv<float>)(it.pool, batch_.slots[token], head, head_dim,
                                                                     keys + head * head_dim, values + head * head_dim);
    }
  }

  void attend(const Attend& it, int chunk, int thread) {
    const Item& item = items_[chunk];
    const AttentionShape& shape = it.shape;
    const int rows = item.tile.num_queries * shape.group(), size = part_size(shape.head_dim);
    AttentionScratch scratch(thread_memory(thread), max_tile_rows_, shape.head_dim);
    lay_out_queries_for(it.pool, shape, item.tile, it.queries, it.query_stride, scratch.queries);
    if (item.partial >= 0) {
      attend_part(it.pool, shape, item.tile, item.start, item.end, scratch);
      std::copy(scratch.part, scratch.part + rows * size, partials_ + item.partial);
      return;
    }
    for (int row = 0; row < rows; ++row) clear_part(scratch.total + row * size, shape.head_dim);
    for (int start = 0; start < item.end; start += kPartKeys) {
      attend_part(it.pool, shape, item.tile, start, std::min(item.end, start + kPartKeys), scratch);
      for (int row = 0; row < rows; ++row)
        merge_part(scratch.total + row * size, scratch.part + row * size, shape.head_dim);
    }
    for (int row = 0; row < rows; ++row) write_attended(scratch.total + row * size, shape.head_dim, output_of(it, item.tile, row));
  }

  void merge(const Attend& it, int chunk, int thread) {
    const Merge& merge = merges_[chunk];
    const AttentionShape& shape = it.shape;
    const int rows = merge.tile.num_queries * shape.group(), size = part_size(shape.head_dim);
    AttentionScratch scratch(thread_memory(thread), max_tile_rows_, shape.head_dim);
    for (int row = 0; row < rows; ++row) {
      clear_part(scratch.total, shape.head_dim);
      for (int part = 0; part < merge.num_parts; ++part)
        merge_part(scratch.total, partials_ + merge.first_partial + (int64_t)(part * rows + row) * size, shape.head_dim);
      write_attended(scratch.total, shape.head_dim, output_of(it, merge.tile, row));
    }
  }

  static float* output_of(const Attend& it, const Tile& tile, int row) {
    const int group = it.shape.group();
    return it.output + (tile.first_token + row / group) * it.output_stride +
           (int64_t)(tile.kv_head * group + row % group) * it.shape.head_dim;
  }

  void gather(const Gather& it, int chunk) {
    const float* from = it.input + batch_.sampled[chunk] * it.input_stride;
    std::copy(from, from + it.size, it.output + chunk * it.output_stride);
  }

  const Operation* operations_;
  const Batch& batch_;
  const int num_threads_;
  int64_t* operation_ns_;
  int64_t last_ns_;
  std::vector<Stage> stages_;
  std::vector<Item> items_;
  std::vector<Merge> merges_;
  int max_tile_rows_ = 0;
  int64_t partial_floats_ = 0, thread_floats_ = 0;
  float *shared_, *partials_, *threads_;
  std::vector<int> laid_out_;  // by thread: the stage whose rows are in its memory
};

// The scale of one output's int8 weights: its greatest becomes 127.
template <class Source>
float scale_of(const Source* row, int inputs) {
  float greatest = 0.0f;
  for (int k = 0; k < inputs; ++k) greatest = std::max(greatest, std::fabs(widen_element(row[k])));
  return greatest / 127.0f;
}

template <class Source>
void pack(const Source* weights, int outputs, int inputs, int32_t type, int32_t epilogue, void* packed, float* scales) {
  std::memset(packed, 0, num_panels(outputs, epilogue) * panel_bytes(inputs, type));
  for (int panel = 0; panel < num_panels(outputs, epilogue); ++panel)
    for (int column = 0; column < kPanel; ++column) {
      const int row = source_row(panel, column, outputs, epilogue);
      if (row < 0) continue;
      const Source* from = weights + (int64_t)row * inputs;
      // A column of a panel is laid out alike in every matrix: as the output of that number.
      const int64_t base = place_of(panel * kPanel + column, 0, inputs, type);
      if (type == kFloat32) {
        for (int k = 0; k < inputs; ++k) ((float*)packed)[base + (int64_t)k * kPanel] = widen_element(from[k]);
      } else if (type == kBfloat16) {
        for (int k = 0; k < inputs; ++k)
          ((uint16_t*)packed)[base + (int64_t)(k / 2) * 2 * kPanel + k % 2] = narrow(widen_element(from[k]));
      } else {
        const float scale = scales[row] = scale_of(from, inputs);
        const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        for (int k = 0; k < inputs; ++k)
          ((int8_t*)packed)[base + (int64_t)k * kPanel] = (int8_t)std::lrint(widen_element(from[k]) * inverse);
      }
    }
}

}  // namespace legato

// What Python calls. Pointers are to memory that the caller owns and keeps until the call returns.
extern "C" {

using namespace legato;

struct Engine {
  explicit Engine(int num_threads) : team(num_threads) {}
  Team team;
  std::vector<float> memory;
};

// 0, or the error number with which the system refused what these kernels need. To be called before all others.
int32_t legato_prepare() { return permit_amx(); }

Engine* legato_engine_new(int32_t num_threads) { return new Engine(num_threads); }

void legato_engine_free(Engine* engine) { delete engine; }

void legato_run(Engine* engine, const Operation* operations, int32_t num_operations, const Batch* batch,
                int64_t* operation_ns) {
  Run run(operations, num_operations, *batch, engine->team, engine->memory, operation_ns);
  engine->team.run(run);
}

int64_t legato_operation_size() { return sizeof(Operation); }

int64_t legato_packed_bytes(int32_t outputs, int32_t inputs, int32_t weight_type, int32_t epilogue) {
  return num_panels(outputs, epilogue) * panel_bytes(inputs, weight_type);
}

// Pack (outputs, inputs) weights, of float32 or bfloat16; int8 also writes a scale for each output.
void legato_pack(const void* weights, int32_t source_type, int32_t outputs, int32_t inputs, int32_t weight_type,
                 int32_t epilogue, void* packed, float* scales) {
  if (source_type == kBfloat16)
    pack((const uint16_t*)weights, outputs, inputs, weight_type, epilogue, packed, scales);
  else
    pack((const float*)weights, outputs, inputs, weight_type, epilogue, packed, scales);
}

}  // extern "C"
