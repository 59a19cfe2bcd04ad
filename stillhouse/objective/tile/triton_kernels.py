"""Triton kernels for the pass over a tile with at most one dense teacher and one temperature.

They compute `pointwise.raw_sums`, `normalized_sums` and `gradient`, in float32. Each program works on one piece,
BLOCK columns of one row. The piece's logits stay in registers between the search for the largest logit and the sums,
so each sweep reads a tile once. `statistics.merged` combines the sums of the pieces.

    s, t    logits of student and teacher
    ls, lt  l = (logit − reference) / temperature of student and teacher
    q, p    e^l of student and teacher in `raw_sums_kernel`, their probabilities in the other kernels
    ratio   log(q/p)

AT_…: the column of a number in a row of a buffer, or −1 if the plan does not have this number.
"""

import triton
import triton.language as tl

#: `numerics.NEAR`
NEAR = tl.constexpr(0.25)
FAR = tl.constexpr(-200.0)
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)
TINY = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _exp(l):
    # tl.exp needs six instructions, because it also computes subnormal results
    return tl.exp2(l * LOG2_E)


@triton.jit
def _clamped(t):
    return tl.minimum(tl.maximum(t, -NEAR), NEAR)


@triton.jit
def _second_order(t):
    """Return `numerics.second_order`."""
    result = t * (1.0 / 720.0) + 1.0 / 120.0
    result = result * t + 1.0 / 24.0
    result = result * t + 1.0 / 6.0
    result = result * t + 0.5
    return result * t * t


@triton.jit
def _expect(probability, quantity):
    return tl.where(probability == 0, 0.0, probability * quantity)


@triton.jit
def _excess(a, b, t, second, near):
    """Return `numerics.excess`. second: `_second_order` of t. near: True where t is near 0 and second is used."""
    return tl.where(near, a * second, b - a - _expect(a, t))


@triton.jit
def _sum2(a, b):
    return tl.sum(a, 0), tl.sum(b, 0)


@triton.jit
def _sum3(a, b, c):
    return tl.sum(a, 0), tl.sum(b, 0), tl.sum(c, 0)


@triton.jit
def _softmax_terms(l, is_largest):
    """Return e^l, e^l with 0 at the largest logits, and e^l·l. For l below FAR, e^l is 0."""
    mass = _exp(l)
    return mass, tl.where(is_largest, 0.0, mass), mass * tl.maximum(l, FAR)


@triton.jit
def raw_sums_kernel(
    student,
    teacher,
    out,
    rows,
    columns,
    student_stride,
    teacher_stride,
    temperature,
    X: tl.constexpr,
    HAS_TEACHER: tl.constexpr,
    IS_UNIT: tl.constexpr,
    AT_REFERENCE: tl.constexpr,
    AT_BOTH_TOP: tl.constexpr,
    AT_LARGEST: tl.constexpr,
    AT_STUDENT: tl.constexpr,
    AT_TEACHER: tl.constexpr,
    AT_MASS_GAP: tl.constexpr,
    AT_FORWARD: tl.constexpr,
    AT_REVERSE: tl.constexpr,
    AT_UNIFORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the columns of `plan.raw_sums` of one piece of one row to out [P, C, X]."""
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = piece * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    s = tl.load(student + row * student_stride + column, mask=inside, other=-float("inf"))
    to = out + (piece.to(tl.int64) * rows + row) * X
    if HAS_TEACHER:
        t = tl.load(teacher + row * teacher_stride + column, mask=inside, other=-float("inf"))
    top_s = tl.max(s, 0)
    tl.store(to + AT_REFERENCE, top_s)
    gap_s = s - tl.maximum(top_s, LOWEST)
    is_top_s = gap_s == 0
    ls = gap_s
    if not IS_UNIT:
        ls = gap_s / temperature
    q, others, mean = _softmax_terms(ls, is_top_s)
    largest, others, mean = _sum3(is_top_s.to(tl.float32), others, mean)
    tl.store(to + AT_LARGEST, largest)
    tl.store(to + AT_STUDENT, others)
    tl.store(to + AT_STUDENT + 1, mean)
    if AT_UNIFORM >= 0:
        total, count = _sum2(tl.where(inside, gap_s, 0.0), inside.to(tl.float32))
        tl.store(to + AT_UNIFORM, total)
        tl.store(to + AT_UNIFORM + 1, count)
    if HAS_TEACHER:
        top_t = tl.max(t, 0)
        tl.store(to + AT_REFERENCE + 1, top_t)
        gap_t = t - tl.maximum(top_t, LOWEST)
        is_top_t = gap_t == 0
        lt = gap_t
        if not IS_UNIT:
            lt = gap_t / temperature
        p, others, mean = _softmax_terms(lt, is_top_t)
        largest, others, mean = _sum3(is_top_t.to(tl.float32), others, mean)
        tl.store(to + AT_LARGEST + 1, largest)
        tl.store(to + AT_TEACHER, others)
        tl.store(to + AT_TEACHER + 1, mean)
        tl.store(to + AT_BOTH_TOP, (tl.max(gap_s + gap_t, 0) == 0).to(tl.float32))
        if AT_MASS_GAP >= 0:
            ratio = ls - lt
            near = tl.abs(ratio) < NEAR
            small = _clamped(ratio)
            second = _second_order(small)
            gap = tl.sum(tl.where(near, p * (small + second), q - p), 0)
            tl.store(to + AT_MASS_GAP, gap)
            if AT_FORWARD >= 0:
                excess, log_ratio = _sum2(_excess(p, q, ratio, second, near), _expect(p, ratio))
                tl.store(to + AT_FORWARD, excess)
                tl.store(to + AT_FORWARD + 1, log_ratio)
            if AT_REVERSE >= 0:
                second = _second_order(-small)
                excess, log_ratio = _sum2(_excess(q, p, -ratio, second, near), _expect(q, -ratio))
                tl.store(to + AT_REVERSE, excess)
                tl.store(to + AT_REVERSE + 1, log_ratio)


@triton.jit
def _to_mean(p, q, log_p, log_q, ratio, BETA: tl.constexpr, SERIES: tl.constexpr):
    """Return m = BETA·p + (1 − BETA)·q, log(m/p) and log(m/q), computed as by `numerics.interpolation_logs`."""
    m = tl.maximum(BETA * p + (1.0 - BETA) * q, TINY)
    log_m = tl.log(m)
    near = tl.abs(ratio) < NEAR
    small = _clamped(ratio)
    value_p = small * SERIES[5] + SERIES[4]
    for n in tl.static_range(4):
        value_p = value_p * small + SERIES[3 - n]
    value_p = value_p * small
    return m, tl.where(near, value_p, log_m - log_p), tl.where(near, value_p - small, log_m - log_q)


@triton.jit
def _log_probabilities(s, t, row, temperature, IS_UNIT: tl.constexpr):
    """Return log q, log p and log(q/p). row: the normalizers of a row, in the order of `plan.normalizers`."""
    ls, lt = s - tl.load(row), t - tl.load(row + 1)
    if not IS_UNIT:
        ls, lt = ls / temperature, lt / temperature
    return ls - tl.load(row + 2), lt - tl.load(row + 3), ls - lt - tl.load(row + 4)


@triton.jit
def normalized_sums_kernel(
    student,
    teacher,
    normalizers,
    out,
    rows,
    columns,
    student_stride,
    teacher_stride,
    row_stride,
    temperature,
    IS_UNIT: tl.constexpr,
    BETA: tl.constexpr,
    WEIGHT_P: tl.constexpr,
    WEIGHT_Q: tl.constexpr,
    SERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write Σf and Σq·h of a Jensen–Shannon divergence for one piece of one row to out [P, C, 2]."""
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = piece * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    s = tl.load(student + row * student_stride + column, mask=inside, other=-float("inf"))
    t = tl.load(teacher + row * teacher_stride + column, mask=inside, other=-float("inf"))
    log_q, log_p, ratio = _log_probabilities(s, t, normalizers + row * row_stride, temperature, IS_UNIT)
    q, p = _exp(log_q), _exp(log_p)
    m, m_to_p, m_to_q = _to_mean(p, q, log_p, log_q, ratio, BETA, SERIES)
    value_p = _excess(p, m, m_to_p, _second_order(_clamped(m_to_p)), tl.abs(m_to_p) < NEAR)
    value_q = _excess(q, m, m_to_q, _second_order(_clamped(m_to_q)), tl.abs(m_to_q) < NEAR)
    # in columns after the last one, p and q are 0, but m is TINY, so the value there has to be set to 0
    value, slope = tl.where(inside, WEIGHT_P * value_p + WEIGHT_Q * value_q, 0.0), -WEIGHT_Q * _expect(q, m_to_q)
    value, slope = _sum2(value, slope)
    to = out + (piece.to(tl.int64) * rows + row) * 2
    tl.store(to, value)
    tl.store(to + 1, slope)


@triton.jit
def gradient_kernel(
    student,
    teacher,
    numbers,
    out,
    columns,
    student_stride,
    teacher_stride,
    row_stride,
    out_stride,
    temperature,
    softcap,
    scale,
    HAS_PAIR: tl.constexpr,
    IS_UNIT: tl.constexpr,
    IS_CAPPED: tl.constexpr,
    AT_STUDENT_MASS: tl.constexpr,
    AT_COUNTED: tl.constexpr,
    AT_PROBABILITY: tl.constexpr,
    AT_LOG_PROBABILITY: tl.constexpr,
    AT_FORWARD: tl.constexpr,
    AT_REVERSE: tl.constexpr,
    AT_JSD: tl.constexpr,
    AT_UNIFORM: tl.constexpr,
    BETA: tl.constexpr,
    WEIGHT_Q: tl.constexpr,
    SERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write `pointwise.gradient` of one piece of one row. numbers: the normalizers and coefficients [C, X]."""
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = piece * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    s = tl.load(student + row * student_stride + column, mask=inside, other=0.0)
    number = numbers + row * row_stride
    if HAS_PAIR:
        t = tl.load(teacher + row * teacher_stride + column, mask=inside, other=0.0)
        log_q, log_p, ratio = _log_probabilities(s, t, number, temperature, IS_UNIT)
        p = _exp(log_p)
    else:
        log_q = s - tl.load(number)
        if not IS_UNIT:
            log_q = log_q / temperature
        log_q -= tl.load(number + AT_STUDENT_MASS)
    q = _exp(log_q)
    grad = tl.load(number + AT_PROBABILITY) * q
    if AT_LOG_PROBABILITY >= 0:
        grad += tl.load(number + AT_LOG_PROBABILITY) * _expect(q, log_q)
    if AT_FORWARD >= 0:
        small = _clamped(ratio)
        gap = tl.where(tl.abs(ratio) < NEAR, p * (small + _second_order(small)), q - p)
        slope = tl.load(number + AT_FORWARD)
        grad += tl.where(slope == 0, 0.0, slope * gap)
    if AT_REVERSE >= 0:
        slope = tl.load(number + AT_REVERSE)
        grad += tl.where(slope == 0, 0.0, slope * _expect(q, ratio))
    if AT_JSD >= 0:
        _, _, m_to_q = _to_mean(p, q, log_p, log_q, ratio, BETA, SERIES)
        slope = tl.load(number + AT_JSD)
        grad += tl.where(slope == 0, 0.0, slope * (-WEIGHT_Q * _expect(q, m_to_q)))
    if AT_UNIFORM >= 0:
        grad += tl.load(number + AT_UNIFORM)
    if IS_CAPPED:
        capped = s / softcap
        grad *= 1.0 - capped * capped
    grad *= scale
    grad = tl.where(tl.load(number + AT_COUNTED) == 0, 0.0, grad)
    tl.store(out + row * out_stride + column, grad.to(out.dtype.element_ty), mask=inside)
