//! Mixtures of experts.

use super::hyper::Hyper;
use super::rope::exponential;
use super::{ConfigError, DecoderConfig};

/// What experts' scores become before they are compared and mixed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weighting {
    /// A softmax over all experts.
    Softmax,
    /// A sigmoid of each.
    Sigmoid,
    /// A softmax over those that were chosen.
    SoftmaxOfChosen,
}

/// The mixtures of experts of a decoder: the same in all layers that have one.
#[derive(Debug, Clone, PartialEq)]
pub struct Experts {
    /// How many there are.
    pub count: usize,
    /// How many each token goes through.
    pub used: usize,
    /// Width of an expert, in elements.
    pub feed_forward: usize,
    /// Width of what all tokens go through besides, in elements; zero where there is none.
    pub shared_feed_forward: usize,
    /// What scores become.
    pub weighting: Weighting,
    /// Whether weights of the chosen are divided by their sum.
    pub normalised: bool,
    /// What weights are multiplied with.
    pub scale: f32,
    /// Experts are in so many groups of the same size.
    pub groups: usize,
    /// Experts are chosen from so many groups, those whose best two are together the best.
    pub groups_used: usize,
}

/// The least sum that weights are divided by: the smallest normal number in half precision.
const SMALLEST_SUM: f64 = 6.103_515_625e-5;

impl Experts {
    /// Width of all that a token goes through, in elements.
    pub fn width(&self) -> usize {
        self.used.saturating_mul(self.feed_forward).saturating_add(self.shared_feed_forward)
    }

    /// Chooses experts for a token: their numbers, ascending, and their weights. `bias` is added to weights when they are compared.
    ///
    /// Of the same weight the expert with the lower number is taken. Computed in double precision from additions, multiplications and
    /// divisions, so that every machine chooses the same.
    pub fn choose(&self, scores: &[f32], bias: Option<&[f32]>) -> Vec<(usize, f32)> {
        let softmax = |scores: &mut [f64]| {
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            scores.iter_mut().for_each(|score| *score = exponential(*score - largest));
            let sum: f64 = scores.iter().sum();
            scores.iter_mut().for_each(|score| *score /= sum);
        };
        let scores: Vec<f64> = scores.iter().map(|&score| if score.is_nan() { 0.0 } else { f64::from(score).clamp(-1e3, 1e3) }).collect();
        let mut weights = scores.clone();
        match self.weighting {
            Weighting::Softmax => softmax(&mut weights),
            Weighting::Sigmoid => weights.iter_mut().for_each(|weight| *weight = 1.0 / (1.0 + exponential(-*weight))),
            Weighting::SoftmaxOfChosen => {}
        }
        // Weights grow with scores, and can be too small to tell apart.
        let mut compared = if bias.is_none() && self.groups == 1 { scores } else { weights.clone() };
        if let Some(bias) = bias {
            compared.iter_mut().zip(bias).for_each(|(weight, &bias)| *weight += f64::from(bias));
        }
        let mut open = vec![true; compared.len()];
        if self.groups > 1 {
            let size = compared.len() / self.groups;
            let best: Vec<f64> = compared
                .chunks(size.max(1))
                .map(|group| {
                    let mut sorted = group.to_vec();
                    sorted.sort_by(|a, b| b.total_cmp(a));
                    sorted.iter().take(2).sum()
                })
                .collect();
            let chosen = largest(&best, &vec![true; best.len()], self.groups_used);
            open.iter_mut().enumerate().for_each(|(expert, open)| *open = chosen.contains(&(expert / size.max(1))));
        }
        let mut chosen = largest(&compared, &open, self.used);
        chosen.sort_unstable();
        let mut mixed: Vec<f64> = chosen.iter().map(|&expert| weights[expert]).collect();
        if self.weighting == Weighting::SoftmaxOfChosen {
            softmax(&mut mixed);
        }
        if self.normalised {
            let sum = mixed.iter().sum::<f64>().max(SMALLEST_SUM);
            mixed.iter_mut().for_each(|weight| *weight /= sum);
        }
        chosen.into_iter().zip(mixed).map(|(expert, weight)| (expert, (weight * f64::from(self.scale)) as f32)).collect()
    }
}

/// Places of the `count` largest of the open values, the largest first.
fn largest(values: &[f64], open: &[bool], count: usize) -> Vec<usize> {
    let mut places: Vec<usize> = (0..values.len()).filter(|&place| open[place]).collect();
    places.sort_by(|&a, &b| values[b].total_cmp(&values[a]).then(a.cmp(&b)));
    places.truncate(count);
    places
}

impl DecoderConfig {
    /// Replaces dense parts with the file's mixtures of experts. `weighting` and `normalised` are what the architecture does where the file
    /// does not say.
    pub(super) fn with_experts(mut self, hyper: &Hyper<'_>, weighting: Weighting, normalised: bool) -> Result<DecoderConfig, ConfigError> {
        const USED: &str = "expert_used_count";
        let count = hyper.count("expert_count")?;
        let used = hyper.count(USED)?;
        if used > count {
            return Err(hyper.invalid(USED, "no more than there are experts", used));
        }
        let weighting = match hyper.count_or_zero("expert_gating_func")? {
            None => weighting,
            Some(1) => Weighting::Softmax,
            Some(2) => Weighting::Sigmoid,
            Some(3) => Weighting::SoftmaxOfChosen,
            Some(other) => return Err(hyper.unsupported(format!("experts' weights of type {other}"))),
        };
        let feed_forward = match hyper.count_or_zero("expert_feed_forward_length")? {
            Some(width) => width,
            None => self.feed_forward,
        };
        let shared = match hyper.count_or_zero("expert_shared_feed_forward_length")? {
            Some(width) => width,
            None => feed_forward * hyper.count_or_zero("expert_shared_count")?.unwrap_or(0),
        };
        let groups = hyper.count_or_zero("expert_group_count")?.unwrap_or(1);
        let groups_used = hyper.count_or_zero("expert_group_used_count")?.unwrap_or(groups);
        if !count.is_multiple_of(groups) || groups_used > groups || used > count / groups * groups_used {
            return Err(hyper.invalid("expert_group_count", "a number of groups from which so many experts can be chosen", groups));
        }
        self.experts = Some(Experts {
            count,
            used,
            feed_forward,
            shared_feed_forward: shared,
            weighting,
            normalised: hyper.bool_if_any("expert_weights_norm")?.unwrap_or(normalised),
            scale: hyper.positive_or_zero("expert_weights_scale")?.unwrap_or(1.0),
            groups,
            groups_used,
        });
        Ok(self.map_layers(|tensors, layer| tensors.with_experts(hyper.gguf(), layer)))
    }

    /// The same, if the file has any.
    pub(super) fn with_experts_if_any(
        self,
        hyper: &Hyper<'_>,
        weighting: Weighting,
        normalised: bool,
    ) -> Result<DecoderConfig, ConfigError> {
        match hyper.count_or_zero("expert_count")? {
            Some(_) => self.with_experts(hyper, weighting, normalised),
            None => Ok(self),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn experts(weighting: Weighting) -> Experts {
        Experts {
            count: 4,
            used: 2,
            feed_forward: 1,
            shared_feed_forward: 0,
            weighting,
            normalised: false,
            scale: 1.0,
            groups: 1,
            groups_used: 1,
        }
    }

    fn close(found: &[(usize, f32)], expected: &[(usize, f64)]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!(found.0, expected.0);
            assert!((f64::from(found.1) - expected.1).abs() < 1e-6, "{found:?} {expected:?}");
        }
    }

    #[test]
    fn the_best_are_chosen_and_weighed() {
        let scores = [1.0, 3.0, -2.0, 2.0];
        let e = |x: f64| x.exp();
        let sum = e(1.0) + e(3.0) + e(-2.0) + e(2.0);
        close(&experts(Weighting::Softmax).choose(&scores, None), &[(1, e(3.0) / sum), (3, e(2.0) / sum)]);
        let of_two = [(1, e(3.0) / (e(3.0) + e(2.0))), (3, e(2.0) / (e(3.0) + e(2.0)))];
        close(&experts(Weighting::SoftmaxOfChosen).choose(&scores, None), &of_two);
        let normalised = Experts { normalised: true, ..experts(Weighting::Softmax) };
        close(&normalised.choose(&scores, None), &of_two);
        let sigmoid = |x: f64| 1.0 / (1.0 + e(-x));
        let scaled = Experts { scale: 2.5, ..experts(Weighting::Sigmoid) };
        close(&scaled.choose(&scores, None), &[(1, 2.5 * sigmoid(3.0)), (3, 2.5 * sigmoid(2.0))]);
        // The bias brings in the third, with its own small weight.
        close(&experts(Weighting::Sigmoid).choose(&scores, Some(&[0.0, 0.0, 1.0, 0.0])), &[(1, sigmoid(3.0)), (2, sigmoid(-2.0))]);
    }

    #[test]
    fn groups_are_chosen_first() {
        let grouped = Experts { groups: 2, groups_used: 1, ..experts(Weighting::Sigmoid) };
        // The single best is in the group that is worse together.
        let chosen: Vec<usize> = grouped.choose(&[3.0, -9.0, 1.5, 1.0], None).into_iter().map(|(expert, _)| expert).collect();
        assert_eq!(chosen, [2, 3]);
    }

    #[test]
    fn equal_and_broken_scores_have_an_order() {
        let chosen = |scores: [f32; 4]| experts(Weighting::Softmax).choose(&scores, None).into_iter().map(|(e, _)| e).collect::<Vec<_>>();
        assert_eq!(chosen([1.0; 4]), [0, 1]);
        assert_eq!(chosen([f32::NAN; 4]), [0, 1]);
        assert_eq!(chosen([f32::NEG_INFINITY, 200.0, -200.0, 0.0]), [1, 3]);
    }
}
