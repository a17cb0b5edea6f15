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
            s.to_floats(s.to_ints(bounded)),
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
        bits.extend(half.map(u32::from));
        bits
    }
}

/// Every integer operation.
struct Ints<'a> {
    low: &'a [u8; 256],
    high: &'a [u8; 128],
    x: [&'a [i8; BLOCK]; 3],
}

impl Op for Ints<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn eval<S: Simd>(self, s: S) -> Vec<f32> {
        let mut results = Vec::new();
        results.extend(s.dot_unsigned::<0, 3>(self.low, &[], self.x).as_flattened());
        results.extend(s.dot_unsigned::<1, 3>(self.low, &self.high[..64], self.x).as_flattened());
        results.extend(s.dot_unsigned::<2, 3>(self.low, self.high, self.x).as_flattened());
        results.extend(s.dot_nibbles::<3>(self.low, self.x));
        let mut signed = [0i8; 512];
        for (i, signed) in signed.iter_mut().enumerate() {
            *signed = (self.low[i % 256] ^ self.high[i % 128]) as i8;
        }
        results.extend(s.dot_signed::<3>(&signed, self.x));
        // Every level there is, the largest magnitudes too.
        let levels = std::array::from_fn(|i| if self.high[i] == 0x80 { -127 } else { self.high[i] as i8 });
        results.extend(s.dot_levels::<3>(self.low, &levels, self.x).as_flattened());
        let (a, b): ([u8; LANES], [i8; LANES]) = (std::array::from_fn(|i| self.low[i]), std::array::from_fn(|i| self.x[0][i]));
        let (a, b) = (s.load_u8(&a), s.load_i8(&b));
        results.extend([s.add_ints(a, b), s.sub_ints(a, b), s.mul_ints(a, b), s.splat_int(-7), s.zero_ints()]);
        results
            .into_iter()
            .flat_map(|ints| {
                let mut out = [0.0; LANES];
                s.store(s.to_floats(ints), &mut out);
                out
            })
            .collect()
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
        x in proptest::collection::vec(-127i8..=127, 3 * BLOCK),
    ) {
        check_ints(&low, &high, &x);
    }
}

fn check_ints(low: &[u8], high: &[u8], x: &[i8]) {
    let (x, _) = x.as_chunks::<BLOCK>();
    let ints = || Ints { low: low.try_into().unwrap(), high: high.try_into().unwrap(), x: [&x[0], &x[1], &x[2]] };
    let expected = Isa::Scalar(Scalar).run(ints());
    for isa in Isa::all() {
        assert_eq!(expected, isa.run(ints()), "{}", isa.name());
    }
}

/// The largest sums must not saturate sixteen bits.
#[test]
fn extreme_weights_and_activations_do_not_saturate() {
    for byte in [0, 0x80, 0xff] {
        for x in [-127, 127] {
            for other in [0, 0xff] {
                check_ints(&[byte; 256], &[byte ^ other; 128], &[x; 3 * BLOCK]);
            }
        }
    }
}

/// The layout of unsigned weights, spelled out once for each width.
#[test]
fn unsigned_layout_is_as_described() {
    let (mut low, mut high) = ([0u8; 256], [0u8; 128]);
    let value = |row: usize, element: usize| ((row * 5 + element * 3) % 64) as u8;
    for row in 0..LANES {
        for element in 0..BLOCK {
            let (half, j, i) = (element / 16, element % 16 / 4, element % 4);
            low[64 * j + 4 * row + i] |= (value(row, element) & 15) << (4 * half);
            high[64 * half + 4 * row + i] |= (value(row, element) >> 4) << (2 * j);
        }
    }
    for row in 0..LANES {
        for element in 0..BLOCK {
            let mut x = [0i8; BLOCK];
            x[element] = 1;
            let sums = Scalar.dot_unsigned::<2, 1>(&low, &high, [&x]);
            assert_eq!(sums[0][element / 16][row], i32::from(value(row, element)));
        }
    }
}
