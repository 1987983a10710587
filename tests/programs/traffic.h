// Checked traffic between two ends: SENDs, WRITEs with immediate data and without, and READs of many sizes in both
// directions, until something happens.
#ifndef FREEFLOW_TEST_TRAFFIC_H
#define FREEFLOW_TEST_TRAFFIC_H

#include "harness.h"

struct traffic {
    struct endpoint e;
    uint64_t random;
    uint64_t posted, completed, received; // requests; `received`: messages that took a RECV
    uint32_t sent;                        // such messages among `posted`
    unsigned receives_posted;
    uint8_t kinds[64];                    // of the outstanding requests, by position
    uint32_t lengths[64];
    bool evented;
    // The first completion that was not a success.
    enum ibv_wc_status error;
    uint64_t error_ns;
    bool corrupt;
};

// Opens, fills the buffers and connects. False if that failed (the other end may have died).
bool traffic_open(struct traffic *t, struct side *side, const struct options *options, uint64_t seed);
// Posts what fits, takes what is there. False after the first completion with an error or wrong bytes.
bool traffic_turn(struct traffic *t, bool post);
// Sleeps until there may be something to take; only for `evented` traffic.
bool traffic_sleep(struct traffic *t, unsigned ms);
// After an error: takes the flushed rest. False if anything is missing after so many milliseconds.
bool traffic_flush(struct traffic *t, unsigned ms);
bool traffic_idle(const struct traffic *t);
#endif
