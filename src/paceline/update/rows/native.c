/*
 * The hash index of row tables, and the moves of rows, at the speed of the memory.
 *
 * Nothing here allocates, keeps state or takes a lock: all memory is the caller's, and calls that share no memory may
 * run at once. fallback.py does the same in torch, with the same results bit for bit; keep the two together.
 *
 * An index is a power of two of entries, at least one of them empty:
 *
 *     entry = upper 32 bits of the id's hash | (slot + 1)          0 = empty
 *
 * The lower bits of the hash say where an entry belongs; from there it lies in the first place that was free (linear
 * probing). So every entry between an id's own place and its entry is taken. The upper bits tell most other ids apart
 * without a look at them; ids[slot] decides.
 *
 * Where ids lie depends on a seed that is drawn for each index and told to no one: otherwise a peer could choose ids
 * that all belong to one place, and each lookup would pass all of them. Slots do not depend on it, and so no result does.
 * Which server owns an id is the same for all, without a seed.
 *
 * A lookup in a large table is a cache miss or two. Keys are taken in blocks, and what a block will need is asked for
 * before it is used, so that many misses are on their way at once.
 *
 * Functions that check return -1 when all is well, else the position of the first element that is wrong. What is asked
 * for ahead has been checked too: an address outside of an object must not even be computed.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef SOURCE_CRC
#define SOURCE_CRC 0 /* of this file, as hatch_build.py gives it */
#endif

#define BLOCK 32             /* keys whose cache misses overlap */
#define AHEAD 24             /* rows whose cache misses overlap */
#define LINE 64              /* bytes that memory delivers at once */
#define LINES 4              /* asked for of a row; the processor guesses the rest of a long one */
#define UPPER (~(uint64_t)0 << 32)
#define LOWER (~UPPER)
#define GOOD (-1)

/* The finalizer of splitmix64: a bijection, so that only equal ids have equal hashes. */
static inline uint64_t hash_of(int64_t id)
{
    uint64_t z = (uint64_t)id;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

typedef struct {
    uint64_t first, second;
} seed_t;

/* The hash by which an index finds ids. Without the seed nothing is known about it: it is mixed in twice. */
static inline uint64_t seeded_hash(int64_t id, seed_t seed)
{
    return hash_of((int64_t)(hash_of((int64_t)((uint64_t)id ^ seed.first)) ^ seed.second));
}

static inline int64_t slot_of(uint64_t entry)
{
    return (int64_t)(entry & LOWER) - 1;
}

static inline int is_below(int64_t number, int64_t end)
{
    return (uint64_t)number < (uint64_t)end;
}

/* Returns the place of the key's entry, or the empty place where it would lie. */
static inline uint64_t place_of(const uint64_t *entries, uint64_t mask, const int64_t *ids, int64_t num_ids, int64_t key,
                                uint64_t hash)
{
    uint64_t place = hash & mask;
    for (;; place = (place + 1) & mask) {
        uint64_t entry = entries[place];
        if (entry == 0)
            return place;
        if (((entry ^ hash) & UPPER) == 0 && is_below(slot_of(entry), num_ids) && ids[slot_of(entry)] == key)
            return place;
    }
}

/* Hashes a block of keys, and asks for the memory that looking them up will need. */
static inline void prepare(const uint64_t *entries, uint64_t mask, const int64_t *ids, int64_t num_ids, seed_t seed,
                           const int64_t *keys, int64_t num_keys, uint64_t *hashes)
{
    for (int64_t i = 0; i < num_keys; i++) {
        hashes[i] = seeded_hash(keys[i], seed);
        __builtin_prefetch(&entries[hashes[i] & mask]);
    }
    for (int64_t i = 0; i < num_keys; i++) {
        uint64_t entry = entries[hashes[i] & mask];
        if (is_below(slot_of(entry), num_ids))
            __builtin_prefetch(&ids[slot_of(entry)]);
    }
}

static inline int64_t block_from(int64_t start, int64_t num)
{
    return num - start < BLOCK ? num - start : BLOCK;
}

/* slots[i] = where keys[i] has its row, -1 where it has none. */
void paceline_find(const uint64_t *entries, uint64_t mask, const int64_t *ids, int64_t num_ids, uint64_t seed_first,
                   uint64_t seed_second, const int64_t *keys, int64_t num_keys, int64_t *slots)
{
    seed_t seed = {seed_first, seed_second};
    uint64_t hashes[BLOCK];
    for (int64_t start = 0; start < num_keys; start += BLOCK) {
        int64_t num = block_from(start, num_keys);
        prepare(entries, mask, ids, num_ids, seed, keys + start, num, hashes);
        for (int64_t i = 0; i < num; i++)
            slots[start + i] = slot_of(entries[place_of(entries, mask, ids, num_ids, keys[start + i], hashes[i])]);
    }
}

/*
 * As find, but ids without a row get one: a slot from the end of `spare` while there is one, then next_slot and up.
 * added[j] = the position in keys of the first occurrence of the j-th new id. Returns how many are new, or -1 - i where
 * the i-th key would get a slot that ids, or an entry, has no room for. The index must have room for all keys.
 */
int64_t paceline_insert(uint64_t *entries, uint64_t mask, int64_t *ids, int64_t num_ids, uint64_t seed_first,
                        uint64_t seed_second, const int64_t *keys, int64_t num_keys, int64_t next_slot,
                        const int64_t *spare, int64_t num_spare, int64_t *slots, int64_t *added)
{
    seed_t seed = {seed_first, seed_second};
    int64_t end = num_ids < (int64_t)LOWER ? num_ids : (int64_t)LOWER; /* an entry has room for slot + 1 */
    uint64_t hashes[BLOCK];
    int64_t num_added = 0;
    for (int64_t start = 0; start < num_keys; start += BLOCK) {
        int64_t num = block_from(start, num_keys);
        prepare(entries, mask, ids, num_ids, seed, keys + start, num, hashes);
        for (int64_t i = 0; i < num; i++) {
            int64_t key = keys[start + i];
            uint64_t place = place_of(entries, mask, ids, num_ids, key, hashes[i]);
            if (entries[place] == 0) {
                int is_spare = num_spare > 0;
                int64_t slot = is_spare ? spare[--num_spare] : next_slot;
                if (!is_below(slot, end))
                    return -1 - (start + i);
                next_slot += !is_spare;
                ids[slot] = key;
                entries[place] = (hashes[i] & UPPER) | (uint64_t)(slot + 1);
                added[num_added++] = start + i;
            }
            slots[start + i] = slot_of(entries[place]);
        }
    }
    return num_added;
}

/* Empties a place, and moves entries behind it up, so that no id is cut off from its own place by the gap. */
static void close_gap(uint64_t *entries, uint64_t mask, const int64_t *ids, seed_t seed, uint64_t gap)
{
    for (uint64_t place = (gap + 1) & mask; entries[place] != 0; place = (place + 1) & mask) {
        uint64_t home = seeded_hash(ids[slot_of(entries[place])], seed) & mask;
        if (((place - home) & mask) < ((place - gap) & mask))
            continue; /* it belongs behind the gap, and is reached without passing it */
        entries[gap] = entries[place];
        gap = place;
    }
    entries[gap] = 0;
}

/* Takes the entries of slots out. Wrong is a slot without an id, before anything changes, or one that has no entry. */
int64_t paceline_erase(uint64_t *entries, uint64_t mask, const int64_t *ids, int64_t num_ids, uint64_t seed_first,
                       uint64_t seed_second, const int64_t *slots, int64_t num_slots)
{
    seed_t seed = {seed_first, seed_second};
    for (int64_t i = 0; i < num_slots; i++)
        if (!is_below(slots[i], num_ids))
            return i;
    for (int64_t i = 0; i < num_slots; i++) {
        if (i + AHEAD < num_slots)
            __builtin_prefetch(&ids[slots[i + AHEAD]]);
        if (i + AHEAD / 2 < num_slots)
            __builtin_prefetch(&entries[seeded_hash(ids[slots[i + AHEAD / 2]], seed) & mask]);
        uint64_t place = seeded_hash(ids[slots[i]], seed) & mask;
        while (entries[place] != 0 && slot_of(entries[place]) != slots[i])
            place = (place + 1) & mask;
        if (entries[place] == 0)
            return i;
        close_gap(entries, mask, ids, seed, place);
    }
    return GOOD;
}

/* Fills empty entries anew from ids, which are read in their order; live[slot] = 0 leaves one out, live may be NULL. */
void paceline_rebuild(uint64_t *entries, uint64_t mask, const int64_t *ids, int64_t num_ids, uint64_t seed_first,
                      uint64_t seed_second, const uint8_t *live, int64_t num_slots)
{
    seed_t seed = {seed_first, seed_second};
    (void)num_ids; /* the caller has checked num_slots */
    uint64_t hashes[BLOCK];
    for (int64_t start = 0; start < num_slots; start += BLOCK) {
        int64_t num = block_from(start, num_slots);
        for (int64_t i = 0; i < num; i++) {
            hashes[i] = seeded_hash(ids[start + i], seed);
            __builtin_prefetch(&entries[hashes[i] & mask], 1);
        }
        for (int64_t i = 0; i < num; i++) {
            if (live != NULL && !live[start + i])
                continue;
            uint64_t place = hashes[i] & mask;
            while (entries[place] != 0)
                place = (place + 1) & mask;
            entries[place] = (hashes[i] & UPPER) | (uint64_t)(start + i + 1);
        }
    }
}

static inline void prefetch_row(const char *row, int64_t row_bytes)
{
    for (int64_t at = 0; at < row_bytes && at < LINES * LINE; at += LINE)
        __builtin_prefetch(row + at);
}

/*
 * Rows lie stride bytes apart and are row_bytes long. out[i] = column[slots[i]]; slot -1 leaves out[i] as it is.
 * Wrong is any other slot outside of the column.
 */
int64_t paceline_gather(const char *column, int64_t stride, int64_t num_rows, const int64_t *slots, int64_t num_slots,
                        char *out, int64_t out_stride, int64_t row_bytes)
{
    for (int64_t i = 0; i < num_slots; i++) {
        if (i + AHEAD < num_slots && is_below(slots[i + AHEAD], num_rows))
            prefetch_row(column + slots[i + AHEAD] * stride, row_bytes);
        if (is_below(slots[i], num_rows))
            memcpy(out + i * out_stride, column + slots[i] * stride, (size_t)row_bytes);
        else if (slots[i] != -1)
            return i;
    }
    return GOOD;
}

/* column[slots[i]] = rows[i]. Wrong is a slot outside of the column. */
int64_t paceline_scatter(char *column, int64_t stride, int64_t num_rows, const int64_t *slots, int64_t num_slots,
                         const char *rows, int64_t rows_stride, int64_t row_bytes)
{
    for (int64_t i = 0; i < num_slots; i++) {
        if (i + AHEAD < num_slots && is_below(slots[i + AHEAD], num_rows))
            prefetch_row(column + slots[i + AHEAD] * stride, row_bytes);
        if (!is_below(slots[i], num_rows))
            return i;
        memcpy(column + slots[i] * stride, rows + i * rows_stride, (size_t)row_bytes);
    }
    return GOOD;
}

/* sums[inverse[i]] += rows[i], one after the other, which fixes how the sums round. Wrong is an inverse out of range. */
#define SUM(NAME, NUMBER)                                                                                              \
    int64_t NAME(const NUMBER *rows, int64_t stride, const int64_t *inverse, int64_t num_rows, NUMBER *sums,           \
                 int64_t num_sums, int64_t width)                                                                      \
    {                                                                                                                  \
        for (int64_t i = 0; i < num_rows; i++) {                                                                       \
            if (i + AHEAD < num_rows && is_below(inverse[i + AHEAD], num_sums))                                        \
                prefetch_row((const char *)(sums + inverse[i + AHEAD] * width), width * (int64_t)sizeof(NUMBER));      \
            if (!is_below(inverse[i], num_sums))                                                                       \
                return i;                                                                                              \
            const NUMBER *restrict row = rows + i * stride;                                                            \
            NUMBER *restrict sum = sums + inverse[i] * width;                                                          \
            for (int64_t j = 0; j < width; j++)                                                                        \
                sum[j] += row[j];                                                                                      \
        }                                                                                                              \
        return GOOD;                                                                                                   \
    }

SUM(paceline_sum_float32, float)
SUM(paceline_sum_float64, double)

static inline int64_t owner_of(int64_t key, int64_t num_servers)
{
    return (int64_t)(((hash_of(key) >> 32) * (uint64_t)num_servers) >> 32);
}

/*
 * order = the positions of keys by the server that owns them, each server's in the order given. ends has num_servers
 * elements, all 0 before; after it, ends[s] is where the positions of server s end.
 */
void paceline_split(const int64_t *keys, int64_t num_keys, int64_t num_servers, int64_t *order, int64_t *ends)
{
    for (int64_t i = 0; i < num_keys; i++)
        ends[owner_of(keys[i], num_servers)]++;
    int64_t start = 0;
    for (int64_t server = 0; server < num_servers; server++) {
        int64_t num = ends[server];
        ends[server] = start;
        start += num;
    }
    for (int64_t i = 0; i < num_keys; i++)
        order[ends[owner_of(keys[i], num_servers)]++] = i;
}

/* What this was built from: Python refuses to call a library that is not of the source beside it. */
uint32_t paceline_source(void) { return SOURCE_CRC; }
