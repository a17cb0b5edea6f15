//! Where and beside what a model runs does not show in what it says.

use super::{Invariant, Scene};

/// What a request was answered is what the model says when it is alone, up to where the answer broke off; all of it, if
/// it was said to be all.
#[derive(Debug, Default)]
pub struct TokensAreExact;

impl Invariant for TokensAreExact {
    fn name(&self) -> &'static str {
        "tokens are exact"
    }

    fn check(&mut self, scene: &Scene<'_>) -> Result<(), String> {
        for heard in &scene.served.heard {
            let right = if heard.whole { heard.tokens == heard.expected } else { heard.expected.starts_with(&heard.tokens) };
            if !right {
                let how = if heard.whole { "all of the" } else { "an" };
                return Err(format!("request {:?} got {:?} as {how} answer, which is {:?}", heard.request, heard.tokens, heard.expected));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use shoal_actors::ids::RequestId;

    use super::super::Heard;
    use super::super::scene::tests::Made;
    use super::*;

    #[test]
    fn parts_are_the_beginning_and_the_whole_is_all() {
        let check = |tokens: &[u32], whole| {
            let mut made = Made::new(2);
            made.served.heard.push(Heard { request: RequestId(1), expected: vec![1, 2, 3], tokens: tokens.to_vec(), whole });
            made.check(&mut TokensAreExact, &[])
        };
        check(&[1, 2, 3], true).unwrap();
        check(&[1, 2], false).unwrap();
        check(&[], false).unwrap();
        for (wrong, whole) in [(&[1, 2][..], true), (&[1, 2, 3, 4], true), (&[1, 2, 4], true), (&[2], false), (&[1, 2, 3, 4], false)] {
            let why = check(wrong, whole).unwrap_err();
            assert!(why.contains("which is [1, 2, 3]"), "{why}");
        }
    }
}
