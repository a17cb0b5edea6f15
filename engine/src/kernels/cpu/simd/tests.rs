use proptest::prelude::*;

use super::*;

/// Every operation on floats, as bits.
struct Floats([f32; LANES], [f32; LANES], [f32; LANES]);

impl Op for Floats {
    type Output = Vec<u32>;

    #[inline(always)]
    fn eval<S: Simd>(self, s: S) -> Vec<u32> {
        let (a, b, c) = (s.load(&self.0), s.load(&self.1), s.load(&self.2));
        let mut half = [0u16; LANES];
        s.store_half(a, &mut half);
        let bits = self.0.map(|v| (v.to_bits() >> 16) as u16);
        let bounded = s.nearest(s.max(s.min(b, s.splat(127.0)), s.splat(-126.0)));
        let results = [
            s.add(a, b),
            s.sub(a, b),
            s.mul(a, b),
            s.div(a, b),
            s.fma(a, b, c),
            s.neg_fma(a, b, c),
            s.max(a, b),
            s.min(a, b),
            s.abs(a),
            s.nearest(a),
            s.where_above(a, b, c),
            s.exp2_integer(bounded),
            s.load_half(&half),
            s.load_brain(&bits),
            s.to_floats(s.to_ints(s.max(s.min(b, s.splat(127.0)), s.splat(-127.0)))),
        ];
        let mut bits = Vec::new();
        for result in results {
            let mut out = [0.0; LANES];
            s.store(result, &mut out);
            bits.extend(out.map(f32::to_bits));
        }
        let mut bytes = [0i8; LANES];
        s.store_i8(s.to_ints(bounded), &mut bytes);
        bits.extend(bytes.map(|b| b as u32));
        bits.extend([s.sum_of(a), s.max_of(a), s.max_of(c)].map(f32::to_bits));
        bits.extend(s.pair_sums(&bytes).map(|sum| sum as u32));
        bits.extend(half.map(u32::from));
        bits
    }
}

/// How many results the integer operations have: two rows of nine, and one.
const COUNT: usize = 19;

/// Every integer operation.
struct Ints<'a> {
    low: &'a [u8; 256],
    high: &'a [u8; 128],
    x: &'a Tile<2>,
}

impl PartOp for (Ints<'_>, &mut [[f32; LANES]]) {
    type Output = ();

    #[inline(always)]
    fn eval<V: Vector>(self, v: V) {
        let (Ints { low, high, x }, out) = self;
        let mut signed = [0i8; 512];
        for (i, signed) in signed.iter_mut().enumerate() {
            *signed = (low[i % 256] ^ high[i % 128]) as i8;
        }
        let fifths: &[u8; 64] = high.first_chunk().unwrap();
        let scales: [[i8; LANES]; 2] = [0, 16].map(|from| std::array::from_fn(|i| low[from + i] as i8));
        let mut results = Vec::new();
        results.extend(v.dot_fours::<2, false>(low, x));
        results.extend(v.dot_fours::<2, true>(low, x));
        results.extend(v.dot_fives::<2, false>(low, fifths, x));
        results.extend(v.dot_fives::<2, true>(low, fifths, x));
        results.extend(v.dot_sixes::<2>(low, high, &scales, x));
        results.extend(v.dot_eights::<2>(&signed, x));
        // Scales up to the largest that there may be.
        let unsigned: [[u8; LANES]; 2] = scales.map(|scales| scales.map(|scale| scale as u8 & 127));
        results.extend(v.dot_halves::<2>(low, &unsigned, x));
        results.extend(v.sum_halves::<2>(&unsigned, x));
        // Every level there is, the largest magnitudes too.
        let levels = std::array::from_fn(|i| if high[i] == 0x80 { -127 } else { high[i] as i8 });
        results.extend(v.dot_levels::<2>(low, &levels, &scales, x));
        results.push(v.load_u8(low.first_chunk().unwrap()));
        for (result, out) in results.into_iter().zip(out) {
            v.store(v.to_floats(result), out);
        }
    }
}

impl Op for Ints<'_> {
    type Output = Vec<[f32; LANES]>;

    #[inline(always)]
    fn eval<S: Simd>(self, s: S) -> Self::Output {
        let mut out = vec![[0.0; LANES]; COUNT];
        s.call((self, out.as_mut_slice()));
        out
    }
}

/// The same, part after part.
struct IntsInParts<'a>(Ints<'a>);

#[derive(Clone, Copy)]
struct OnePart<'a>(&'a Ints<'a>, &'a std::cell::RefCell<Vec<[f32; LANES]>>);

impl PartOp for OnePart<'_> {
    type Output = ();

    #[inline(always)]
    fn eval<V: Vector>(self, v: V) {
        (Ints { ..*self.0 }, self.1.borrow_mut().as_mut_slice()).eval(v);
    }
}

impl Op for IntsInParts<'_> {
    type Output = Vec<[f32; LANES]>;

    #[inline(always)]
    fn eval<S: Simd>(self, s: S) -> Self::Output {
        let out = std::cell::RefCell::new(vec![[0.0; LANES]; COUNT]);
        s.each_part(OnePart(&self.0, &out));
        out.into_inner()
    }
}

fn lane() -> impl Strategy<Value = f32> {
    prop_oneof![
        -1e3f32..1e3,
        -1e-6f32..1e-6,
        any::<f32>().prop_filter("a number", |v| !v.is_nan()),
        Just(0.0),
        Just(-0.0),
        Just(0.5),
        Just(2.5),
        Just(f32::INFINITY),
    ]
}

fn lanes() -> impl Strategy<Value = [f32; LANES]> {
    proptest::array::uniform16(lane())
}

proptest! {
    #[test]
    fn floats_agree_bit_for_bit(a in lanes(), b in lanes(), c in lanes()) {
        let expected = Isa::Scalar(Scalar).run(Floats(a, b, c));
        for isa in Isa::all() {
            let found = isa.run(Floats(a, b, c));
            for (i, (&e, &f)) in expected.iter().zip(&found).enumerate() {
                let both_nan = f32::from_bits(e).is_nan() && f32::from_bits(f).is_nan();
                prop_assert!(e == f || both_nan, "{} result {i}: {e:#x} {f:#x}", isa.name());
            }
        }
    }

    #[test]
    fn integer_dots_agree(
        low in proptest::collection::vec(any::<u8>(), 256),
        high in proptest::collection::vec(any::<u8>(), 128),
        x in proptest::collection::vec(-127i8..=127, 2 * BLOCK),
    ) {
        check_ints(&low, &high, &x);
    }
}

fn check_ints(low: &[u8], high: &[u8], x: &[i8]) {
    let (rows, _) = x.as_chunks::<BLOCK>();
    let x = tile([&rows[0], &rows[1]]);
    let ints = || Ints { low: low.try_into().unwrap(), high: high.try_into().unwrap(), x: &x };
    let expected = Isa::Scalar(Scalar).run(ints());
    for isa in Isa::all() {
        assert_eq!(expected, isa.run(ints()), "{}", isa.name());
        assert_eq!(expected, isa.run(IntsInParts(ints())), "{}", isa.name());
    }
}

/// A tile of rows of one block, scales of one.
fn tile<const T: usize>(rows: [&[i8; BLOCK]; T]) -> Tile<T> {
    let sum = |t: usize, range: std::ops::Range<usize>, pair: usize| -> i32 {
        range.filter(|i| i % 4 / 2 == pair).map(|i| i32::from(rows[t][i])).sum()
    };
    let sums = |t: usize| (0..BLOCK).map(|i| i32::from(rows[t][i])).sum::<i32>();
    Tile {
        values: std::array::from_fn(|j| std::array::from_fn(|t| std::array::from_fn(|i| rows[t][4 * j + i]))),
        scale: [1.0; T],
        scaled_sum: std::array::from_fn(|t| sums(t) as f32),
        sixteenfold: std::array::from_fn(|t| 16 * sums(t)),
        minus_eightfold: std::array::from_fn(|t| [0, 1].map(|pair| (-8 * sum(t, 0..BLOCK, pair)) as i16)),
        minus_32_fold: [0..16, 16..32].map(|half| std::array::from_fn(|t| [0, 1].map(|pair| (-32 * sum(t, half.clone(), pair)) as i16))),
    }
}

/// The largest sums must not saturate sixteen bits.
#[test]
fn extreme_weights_and_activations_do_not_saturate() {
    for byte in [0, 0x80, 0xff] {
        for x in [-127, 127] {
            for other in [0, 0xff] {
                check_ints(&[byte; 256], &[byte ^ other; 128], &[x; 2 * BLOCK]);
            }
        }
    }
}

/// The layouts of weights, spelled out once for each width.
#[test]
fn weights_lie_as_is_described() {
    let (mut low, mut high, mut fifths, mut eights) = ([0u8; 256], [0u8; 128], [0u8; 64], [0i8; 512]);
    let value = |row: usize, element: usize| ((row * 5 + element * 3) % 64) as u8;
    for row in 0..LANES {
        for element in 0..BLOCK {
            let (half, j, i) = (element / 16, element % 16 / 4, element % 4);
            low[64 * j + 4 * row + i] |= (value(row, element) & 15) << (4 * half);
            high[64 * half + 4 * row + i] |= (value(row, element) >> 4) << (2 * j);
            fifths[4 * row + i] |= (value(row, element) >> 4 & 1) << (4 * half + j);
            eights[64 * (element / 4) + 4 * row + i] = value(row, element) as i8;
        }
    }
    let scales = [std::array::from_fn(|row| row as i8 - 3), std::array::from_fn(|row| 5 - row as i8)];
    for element in 0..BLOCK {
        let mut x = [0i8; BLOCK];
        x[element] = 1;
        let x = tile([&x]);
        let [fours] = Scalar.dot_fours::<1, false>(&low, &x);
        let [centred_fours] = Scalar.dot_fours::<1, true>(&low, &x);
        let [fives] = Scalar.dot_fives::<1, false>(&low, &fifths, &x);
        let [centred_fives] = Scalar.dot_fives::<1, true>(&low, &fifths, &x);
        let [sixes] = Scalar.dot_sixes::<1>(&low, &high, &scales, &x);
        let [bytes] = Scalar.dot_eights::<1>(&eights, &x);
        let unsigned = scales.map(|scales: [i8; LANES]| scales.map(|scale| scale as u8 & 127));
        let [halves] = Scalar.dot_halves::<1>(&low, &unsigned, &x);
        let [sums] = Scalar.sum_halves::<1>(&unsigned, &x);
        let [levels] = Scalar.dot_levels::<1>(&low, &std::array::from_fn(|i| 5 * i as i8 - 40), &scales, &x);
        for row in 0..LANES {
            let value = i32::from(value(row, element));
            assert_eq!((fours[row], centred_fours[row]), (value % 16, value % 16 - 8));
            assert_eq!((fives[row], centred_fives[row]), (value % 32, value % 32 - 16));
            assert_eq!(sixes[row], (value - 32) * i32::from(scales[element / 16][row]));
            assert_eq!(bytes[row], value);
            let (signed, unsigned) = (i32::from(scales[element / 16][row]), i32::from(unsigned[element / 16][row]));
            assert_eq!((halves[row], sums[row]), (value % 16 * unsigned, unsigned));
            assert_eq!(levels[row], (5 * (value % 16) - 40) * signed);
        }
    }
}
