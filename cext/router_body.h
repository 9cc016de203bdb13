/* The choice of a row's experts. */

static int route(int32_t *ids, float *weights, const float *scores, const float *bias, float scaling, size_t n, size_t k,
                 float *keys)
{
    map_sigmoid(keys, scores, n);
    map_add(keys, keys, bias, n);

    /* ids[0 .. held) by falling key. Of equals the earlier, which is the lower number, stays in front. */
    size_t held = 0;
    for (size_t e = 0; e < n; e++) {
        float key = keys[e];
        if (key != key)
            return -1;
        if (held == k && !(key > keys[ids[k - 1]]))
            continue;
        size_t at = held < k ? held++ : k - 1;
        for (; at && key > keys[ids[at - 1]]; at--)
            ids[at] = ids[at - 1];
        ids[at] = (int32_t)e;
    }

    for (size_t i = 1; i < k; i++) { /* now by rising number */
        int32_t id = ids[i];
        size_t at = i;
        for (; at && ids[at - 1] > id; at--)
            ids[at] = ids[at - 1];
        ids[at] = id;
    }

    for (size_t i = 0; i < k; i++)
        weights[i] = scores[ids[i]];
    map_sigmoid(weights, weights, k);
    float total = weights[0];
    for (size_t i = 1; i < k; i++)
        total += weights[i];
    total += 1e-20f;
    for (size_t i = 0; i < k; i++)
        weights[i] = weights[i] / total * scaling;
    return 0;
}
