/* RoPE, the KV cache and attention of the serving engine on a CPU. */

#include "tile.h"

#define BLOCK 16          /* tokens in a block of the KV cache */
#define MAX_HEAD_DIM 512
#define KEY_VECTORS (BLOCK / WIDTH < 2 ? 1 : 2)

/* The KV cache of a layer: keys as [block][kv_head][head_dim][BLOCK], values as [block][kv_head][BLOCK][value_stride],
where value_stride is head_dim rounded up to a multiple of PANEL, the rest zero. */
typedef struct {
    float *keys, *values;
    int64_t kv_heads, head_dim, value_stride;
} Cache;

static Cache cache_of(float *keys, float *values, int64_t kv_heads, int64_t head_dim) {
    return (Cache){keys, values, kv_heads, head_dim, (head_dim + PANEL - 1) / PANEL * PANEL};
}

static float *keys_of(const Cache *c, int64_t block, int64_t kv_head) {
    return c->keys + (block * c->kv_heads + kv_head) * c->head_dim * BLOCK;
}

static float *values_of(const Cache *c, int64_t block, int64_t kv_head) {
    return c->values + (block * c->kv_heads + kv_head) * c->value_stride * BLOCK;
}

/* Rows of qkv are [heads of q, of k, of v]. q and k are normed (unless the norms are NULL) and rotated, the first half
of `rotary` against the second; q goes to `query`, k and v into the cache's slots. */
void rope_store(const float *qkv, float *query, float *keys, float *values, const int32_t *slots,
                const int32_t *positions, const float *cos, const float *sin, const float *q_norm, const float *k_norm,
                int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t rotary, float eps,
                int threads) {
    Cache cache = cache_of(keys, values, kv_heads, head_dim);
    int64_t half = rotary / 2;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t token = 0; token < tokens; token++) {
        const float *from = qkv + token * (heads + 2 * kv_heads) * head_dim, *v = from + (heads + kv_heads) * head_dim;
        const float *restrict c = cos + positions[token] * half, *restrict s = sin + positions[token] * half;
        int64_t block = slots[token] / BLOCK, offset = slots[token] % BLOCK;
        for (int64_t head = 0; head < heads + kv_heads; head++) {
            float x[MAX_HEAD_DIM], y[MAX_HEAD_DIM];
            const float *norm = head < heads ? q_norm : k_norm;
            if (norm)
                norm_row(from + head * head_dim, norm, x, head_dim, eps);
            else
                memcpy(x, from + head * head_dim, head_dim * sizeof(float));
            for (int64_t i = 0; i < half; i++) y[i] = x[i] * c[i] - x[i + half] * s[i];
            for (int64_t i = 0; i < half; i++) y[i + half] = x[i + half] * c[i] + x[i] * s[i];
            memcpy(y + rotary, x + rotary, (head_dim - rotary) * sizeof(float));
            if (head < heads)
                memcpy(query + (token * heads + head) * head_dim, y, head_dim * sizeof(float));
            else {
                float *to = keys_of(&cache, block, head - heads) + offset;
                for (int64_t i = 0; i < head_dim; i++) to[i * BLOCK] = y[i];
            }
        }
        for (int64_t head = 0; head < kv_heads; head++) {
            float *to = values_of(&cache, block, head) + offset * cache.value_stride;
            memcpy(to, v + head * head_dim, head_dim * sizeof(float));
        }
    }
}

typedef struct {
    const float *query;
    float *out;
    Cache cache;
    const int32_t *block_table, *starts, *context;
    int64_t table_stride, heads, window;
    float scale;
} Attention;

/* Rows of one sequence and one KV head; row r is query r / group of the sequence, head r % group of the KV head. */
typedef struct {
    int64_t sequence, kv_head, row, rows;
    int64_t begin, end; /* of the positions that its rows see */
    int64_t job;        /* number of chunks of all tiles before it */
} Tile;

static int64_t position_of(const Attention *a, int64_t sequence, int64_t row) {
    int64_t queries = a->starts[sequence + 1] - a->starts[sequence];
    return a->context[sequence] - queries + row / (a->heads / a->cache.kv_heads);
}

static int64_t first_seen(const Attention *a, int64_t position) { return MAX(0, position + 1 - a->window); }

static int64_t head_offset(const Attention *a, const Tile *tile, int64_t row) {
    int64_t group = a->heads / a->cache.kv_heads, index = tile->row + row;
    return ((a->starts[tile->sequence] + index / group) * a->heads + tile->kv_head * group + index % group) *
           a->cache.head_dim;
}

/* A tile's positions in one chunk. */
typedef struct {
    const Cache *cache;
    const int32_t *blocks;
    int64_t kv_head, begin, end, last; /* last: the tile's last block */
} Span;

/* Scores of the blocks of a span, CHUNK floats a row. */
INLINE void score(int rows, const Span *s, const float *query, float *scores) {
    const Cache *c = s->cache;
    for (int64_t block = s->begin / BLOCK; block * BLOCK < s->end; block++)
        for (int64_t t = 0; t < BLOCK; t += KEY_VECTORS * WIDTH) {
            vec sums[MAX_ROWS][2] = {0};
            const char *keys = (const char *)(keys_of(c, s->blocks[block], s->kv_head) + t);
            Prefetch next = {(const char *)(keys_of(c, s->blocks[MIN(block + 2, s->last)], s->kv_head) + t), 4 * BLOCK};
            Prefetch values = {(const char *)values_of(c, s->blocks[block], s->kv_head),
                               4 * BLOCK * c->value_stride / c->head_dim};
            multiply_add(rows, KEY_VECTORS, FP32, sums, query, c->head_dim, keys, 4 * BLOCK, c->head_dim, next, values);
#pragma GCC unroll 16
            for (int row = 0; row < rows; row++)
                for (int v = 0; v < KEY_VECTORS; v++)
                    *(vec *)(scores + row * CHUNK + block * BLOCK % CHUNK + t + v * WIDTH) = sums[row][v];
        }
}

/* Sums of the values of a span, weighted by `weights`, CHUNK floats a row. */
INLINE void weigh(int rows, const Span *s, const float *weights, float *out) {
    int64_t stride = s->cache->value_stride;
    for (int64_t i = 0; i < stride; i += PANEL) {
        vec sums[MAX_ROWS][2] = {0};
        for (int64_t t = s->begin; t < s->end; t = (t / BLOCK + 1) * BLOCK) {
            const float *values = values_of(s->cache, s->blocks[t / BLOCK], s->kv_head) + t % BLOCK * stride + i;
            const float *next = values_of(s->cache, s->blocks[MIN(t / BLOCK + 1, s->last)], s->kv_head) + i;
            Prefetch first = {(const char *)next, 4 * stride}, second = {first.at + 64, first.step};
            multiply_add(rows, 2, FP32, sums, weights + t % CHUNK, CHUNK, (const char *)values, 4 * stride,
                         MIN(BLOCK - t % BLOCK, s->end - t), first, second);
        }
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++)
            for (int v = 0; v < 2; v++) ((unaligned_vec *)(out + row * stride + i))[v] = sums[row][v];
    }
}

/* Scores from `from` to `to` become exp(score - largest), and those before and behind, from `begin` to `end`, 0. */
static void softmax(float *s, int64_t begin, int64_t from, int64_t to, int64_t end, float *largest, float *sum) {
    float lanes[LANES] = {0}, most = from < to ? maximum(s + from, to - from) : 0.0f;
    int64_t i = from;
    memset(s + begin, 0, (from - begin) * sizeof(float));
    memset(s + to, 0, (end - to) * sizeof(float));
    for (i = from; i < to; i++) s[i] = within_range_of_exp(s[i] - most);
    for (i = from; i < to; i++) s[i] = exp_f32(s[i]);
    for (i = from; i + LANES <= to; i += LANES)
        for (int l = 0; l < LANES; l++) lanes[l] += s[i + l];
    for (int l = 0; i + l < to; l++) lanes[l] += s[i + l];
    *largest = most;
    *sum = sum_lanes(lanes);
}

/* One tile over the positions of one chunk. `partial` gets, for each of MAX_ROWS rows, the largest score, then the sums
of exp(score - largest) (0: no position was seen), then the values weighted by these, value_stride floats a row. */
static void attend(const Attention *a, const Tile *tile, int64_t chunk, float *partial) {
    const Cache *c = &a->cache;
    float query[MAX_ROWS * MAX_HEAD_DIM], scores[MAX_ROWS * CHUNK] __attribute__((aligned(64)));
    int64_t base = chunk * CHUNK, begin = MAX(tile->begin, base), end = MIN(tile->end, base + CHUNK);
    const int32_t *blocks = a->block_table + tile->sequence * a->table_stride;
    Span span = {c, blocks, tile->kv_head, begin, end, (tile->end - 1) / BLOCK};
    for (int64_t row = 0; row < tile->rows; row++) {
        const float *restrict from = a->query + head_offset(a, tile, row);
        float *restrict to = query + row * c->head_dim;
        for (int64_t i = 0; i < c->head_dim; i++) to[i] = from[i] * a->scale;
    }
    WITH_ROWS(tile->rows, score, &span, query, scores)
    for (int64_t row = 0; row < tile->rows; row++) {
        int64_t position = position_of(a, tile->sequence, tile->row + row);
        int64_t from = MIN(end, MAX(begin, first_seen(a, position))), to = MAX(from, MIN(end, position + 1));
        softmax(scores + row * CHUNK, begin - base, from - base, to - base, end - base, &partial[row],
                &partial[MAX_ROWS + row]);
    }
    WITH_ROWS(tile->rows, weigh, &span, scores, partial + 2 * MAX_ROWS)
}

static void merge(const Attention *a, const Tile *tile, float *state, const float *partial) {
    int64_t n = a->cache.value_stride;
    for (int64_t row = 0; row < tile->rows; row++) {
        float most = state[row], sum = state[MAX_ROWS + row], other = partial[row], other_sum = partial[MAX_ROWS + row];
        float *restrict to = state + 2 * MAX_ROWS + row * n, largest = MAX(most, other);
        const float *restrict from = partial + 2 * MAX_ROWS + row * n;
        if (other_sum == 0.0f) continue;
        if (sum == 0.0f) {
            state[row] = other, state[MAX_ROWS + row] = other_sum;
            memcpy(to, from, n * sizeof(float));
            continue;
        }
        float keep = exp_f32(within_range_of_exp(most - largest)), add = exp_f32(within_range_of_exp(other - largest));
        state[row] = largest, state[MAX_ROWS + row] = MULTIPLY_ADD(sum, keep, other_sum * add);
        for (int64_t i = 0; i < n; i++) to[i] = MULTIPLY_ADD(to[i], keep, from[i] * add);
    }
}

static void write_rows(const Attention *a, const Tile *tile, const float *state) {
    for (int64_t row = 0; row < tile->rows; row++) {
        float *restrict to = a->out + head_offset(a, tile, row), sum = state[MAX_ROWS + row];
        const float *restrict from = state + 2 * MAX_ROWS + row * a->cache.value_stride;
        for (int64_t i = 0; i < a->cache.head_dim; i++) to[i] = from[i] / sum;
    }
}

static int64_t chunks_of(const Tile *tile) { return (tile->end - 1) / CHUNK - tile->begin / CHUNK + 1; }

/* Every tile of the batch; their number. `tiles` may be NULL. */
static int64_t list_tiles(const Attention *a, int64_t sequences, Tile *tiles) {
    int64_t count = 0, job = 0, group = a->heads / a->cache.kv_heads;
    for (int64_t s = 0; s < sequences; s++) {
        int64_t all = (a->starts[s + 1] - a->starts[s]) * group;
        for (int64_t kv_head = 0; kv_head < a->cache.kv_heads; kv_head++)
            for (int64_t row = 0; row < all; row += MAX_ROWS, count++) {
                if (!tiles) continue;
                int64_t rows = MIN(MAX_ROWS, all - row), begin = first_seen(a, position_of(a, s, row));
                tiles[count] = (Tile){s, kv_head, row, rows, begin, position_of(a, s, row + rows - 1) + 1, job};
                job += chunks_of(&tiles[count]);
            }
    }
    return count;
}

/* A thread computes a tile, chunk by chunk; of few tiles it computes one chunk, and they are merged afterwards. */
void attention(const float *query, float *keys, float *values, float *out, const int32_t *block_table,
               const int32_t *starts, const int32_t *context, int64_t sequences, int64_t table_stride, int64_t heads,
               int64_t kv_heads, int64_t head_dim, int64_t window, float scale, int threads) {
    Cache cache = cache_of(keys, values, kv_heads, head_dim);
    Attention a = {query, out, cache, block_table, starts, context, table_stride, heads, window, scale};
    int64_t count = list_tiles(&a, sequences, NULL), size = MAX_ROWS * (2 + cache.value_stride);
    Tile *tiles = malloc((count + 1) * sizeof(Tile));
    list_tiles(&a, sequences, tiles);
    int64_t jobs = count ? tiles[count - 1].job + chunks_of(&tiles[count - 1]) : 0;
    float *partials = threads > 1 && count < 4 * threads && jobs > count ? malloc(jobs * size * sizeof(float)) : NULL;
#pragma omp parallel num_threads(threads)
    {
        if (partials) {
#pragma omp for schedule(dynamic)
            for (int64_t job = 0; job < jobs; job++) {
                const Tile *tile = tiles;
                while (job >= tile->job + chunks_of(tile)) tile++;
                attend(&a, tile, tile->begin / CHUNK + job - tile->job, partials + job * size);
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) {
            const Tile *tile = &tiles[i];
            float state[MAX_ROWS * (2 + MAX_HEAD_DIM)], own[MAX_ROWS * (2 + MAX_HEAD_DIM)];
            memset(state, 0, 2 * MAX_ROWS * sizeof(float));
            for (int64_t chunk = 0; chunk < chunks_of(tile); chunk++) {
                if (!partials) attend(&a, tile, tile->begin / CHUNK + chunk, own);
                merge(&a, tile, state, partials ? partials + (tile->job + chunk) * size : own);
            }
            write_rows(&a, tile, state);
        }
    }
    free(partials);
    free(tiles);
}
