//! Models in several files: `NAME-00001-of-00003.gguf` and so on.
//!
//! The first part has the model's metadata; each says in `split.no` (from 0) and `split.count` which part of how many it is, and in
//! `split.tensors.count` how many tensors all have together. Names are those of llama.cpp's `gguf-split`, and the only way from one part
//! to the others.

use std::path::{Path, PathBuf};

use super::error::{GgufError, GgufFault, Place};
use super::header::Header;
use super::source::Source;

/// One file.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) path: PathBuf,
    pub(super) source: Source,
    pub(super) header: Header,
}

/// Most parts of a model; their numbers have five digits.
const PARTS_LIMIT: u64 = 99_999;
const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

impl Part {
    /// Maps a file and checks its header.
    fn open(path: &Path) -> Result<Part, GgufError> {
        let fail = |fault| GgufError { file: path.display().to_string(), fault };
        let source = Source::map(path).map_err(|error| fail(GgufFault::Io(error)))?;
        let header = Header::read(source.bytes()).map_err(fail)?;
        Ok(Part { path: path.to_owned(), source, header })
    }

    fn fail(&self, fault: GgufFault) -> GgufError {
        GgufError { file: self.path.display().to_string(), fault }
    }

    fn number(&self, key: &str) -> Option<u64> {
        self.header.metadata.get(key)?.as_u64()
    }

    /// How many parts there are by this one.
    pub(super) fn count(&self) -> u64 {
        self.number(COUNT).unwrap_or(1).max(1)
    }

    /// Makes sure that it is part `number` (from 0) of `count`.
    fn check(&self, number: u64, count: u64) -> Result<(), GgufError> {
        let (says, of) = (self.number(NUMBER), self.count());
        if says == Some(number) && of == count {
            return Ok(());
        }
        let says = says.map_or_else(|| "no part at all".to_owned(), |says| format!("part {} of {of}", says.saturating_add(1)));
        Err(self.fail(GgufFault::WrongPart { number: number + 1, count, says }))
    }
}

/// Opens a file, and the other parts if it is one of several; all are checked. They come in their order.
pub(super) fn open(path: &Path) -> Result<Vec<Part>, GgufError> {
    let given = Part::open(path)?;
    let count = given.count();
    if count == 1 {
        return Ok(vec![given]);
    }
    if count > PARTS_LIMIT {
        return Err(given.fail(GgufFault::Count { at: Place::Key(COUNT.to_owned()), count, limit: PARTS_LIMIT }));
    }
    let Some(names) = Names::of(path).filter(|names| names.count == count) else {
        let number = given.number(NUMBER).unwrap_or(0).saturating_add(1);
        return Err(given.fail(GgufFault::PartName { number, count }));
    };
    given.check(names.number - 1, count)?;
    let mut parts = Vec::new();
    for number in 1..names.number {
        parts.push(names.open(number, &given)?);
    }
    let after = names.number + 1..=count;
    let at = parts.len();
    for number in after {
        parts.push(names.open(number, &given)?);
    }
    parts.insert(at, given);
    together(&parts)?;
    Ok(parts)
}

/// Makes sure that parts have the tensors that they should have together, each once.
fn together(parts: &[Part]) -> Result<(), GgufError> {
    let mut seen = std::collections::HashSet::new();
    for part in parts {
        if let Some(name) = part.header.tensors.keys().find(|name| !seen.insert(name.as_str())) {
            return Err(part.fail(GgufFault::Duplicate { at: Place::Tensor(name.clone()) }));
        }
    }
    let found = seen.len() as u64;
    for part in parts {
        if let Some(claimed) = part.number(TENSORS).filter(|&claimed| claimed != found) {
            return Err(part.fail(GgufFault::PartTensors { claimed, found }));
        }
    }
    Ok(())
}

/// What the name of one part says of all.
#[derive(Debug, PartialEq, Eq)]
struct Names {
    folder: PathBuf,
    /// Up to the dash before the number.
    start: String,
    /// From 1.
    number: u64,
    count: u64,
}

impl Names {
    /// Reads a name like `NAME-00001-of-00003.gguf`.
    fn of(path: &Path) -> Option<Names> {
        let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (start, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| if text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit()) { text.parse().ok() } else { None };
        let (number, count) = (digits(number)?, digits(count)?);
        let folder = path.parent().map(Path::to_owned).unwrap_or_default();
        (1..=count).contains(&number).then(|| Names { folder, start: start.to_owned(), number, count })
    }

    fn path(&self, number: u64) -> PathBuf {
        self.folder.join(format!("{}-{number:05}-of-{:05}.gguf", self.start, self.count))
    }

    /// Opens another part than the one `given`.
    fn open(&self, number: u64, given: &Part) -> Result<Part, GgufError> {
        let path = self.path(number);
        let part = Part::open(&path).map_err(|error| match error.fault {
            GgufFault::Io(error) if error.kind() == std::io::ErrorKind::NotFound => {
                given.fail(GgufFault::MissingPart { number, count: self.count, path: path.display().to_string() })
            }
            fault => GgufError { file: error.file, fault },
        })?;
        part.check(number - 1, self.count)?;
        Ok(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::{Gguf, Value, Writer};
    use crate::quant::BlockType;

    const NAMES: [&str; 3] = ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf"];

    fn part(number: u16, tensors: &[&str]) -> Writer {
        let mut writer = Writer::new();
        if number == 0 {
            writer.metadata("general.architecture", Value::String("llama".into()));
        }
        writer.metadata(NUMBER, Value::U16(number)).metadata(COUNT, Value::U16(3)).metadata(TENSORS, Value::I32(3));
        for name in tensors {
            writer.tensor(name, &[32], BlockType::Q8_0, vec![number as u8 + 1; 34]);
        }
        writer
    }

    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (number, tensors) in [(0, &["a"][..]), (1, &[]), (2, &["b", "c"])] {
            std::fs::write(folder.path().join(NAMES[number]), part(number as u16, tensors).finish()).unwrap();
        }
        folder
    }

    #[test]
    fn any_part_opens_the_whole() {
        let folder = folder();
        for name in NAMES {
            let gguf = Gguf::open(&folder.path().join(name)).unwrap();
            assert_eq!(gguf.str("general.architecture"), Some("llama"));
            assert_eq!(gguf.tensors().map(|view| view.name).collect::<Vec<_>>(), ["a", "b", "c"]);
            assert_eq!((gguf.tensor("a").unwrap().bytes[0], gguf.tensor("c").unwrap().bytes[0]), (1, 3));
            assert!(gguf.tensor("d").is_none());
            assert!(gguf.files().eq(NAMES.iter().map(|name| folder.path().join(name))));
            let all: u64 = NAMES.iter().map(|name| std::fs::metadata(folder.path().join(name)).unwrap().len()).sum();
            assert_eq!(gguf.file_bytes(), all);
            gguf.forget(&gguf.tensor("b").unwrap());
            assert_eq!(gguf.tensor("b").unwrap().bytes, [3; 34]);
        }
    }

    #[test]
    fn what_is_wrong_with_parts_is_said() {
        let error = |change: &dyn Fn(&Path), opened: &str| {
            let folder = folder();
            change(folder.path());
            Gguf::open(&folder.path().join(opened)).unwrap_err().to_string()
        };
        let missing = error(&|folder| std::fs::remove_file(folder.join(NAMES[1])).unwrap(), NAMES[2]);
        assert!(missing.contains("part 2 of 3 is not there") && missing.contains(NAMES[1]), "{missing}");
        let renamed = error(&|folder| std::fs::rename(folder.join(NAMES[0]), folder.join("model.gguf")).unwrap(), "model.gguf");
        assert!(renamed.contains("it is part 1 of 3 of a model") && renamed.contains("NAME-00001-of-00003.gguf"), "{renamed}");
        let swapped = error(&|folder| assert!(std::fs::copy(folder.join(NAMES[2]), folder.join(NAMES[1])).unwrap() > 0), NAMES[0]);
        assert!(swapped.contains(NAMES[1]) && swapped.contains("says that it is part 3 of 3"), "{swapped}");
        let other = error(&|folder| std::fs::write(folder.join(NAMES[1]), Writer::new().finish()).unwrap(), NAMES[0]);
        assert!(other.contains("says that it is no part at all"), "{other}");
        let twice = error(&|folder| std::fs::write(folder.join(NAMES[1]), part(1, &["a"]).finish()).unwrap(), NAMES[0]);
        assert!(twice.contains("the tensor \"a\" occurs twice"), "{twice}");
        let more = error(&|folder| std::fs::write(folder.join(NAMES[1]), part(1, &["d"]).finish()).unwrap(), NAMES[0]);
        assert!(more.contains("has 3 tensors in all its parts, and 4 were found"), "{more}");
        let damaged = error(&|folder| std::fs::write(folder.join(NAMES[1]), b"GGU").unwrap(), NAMES[0]);
        assert!(damaged.contains(NAMES[1]) && damaged.contains("it ends within its first bytes"), "{damaged}");
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        let names = Names::of(Path::new("x/a-of-b-00002-of-00010.gguf")).unwrap();
        assert_eq!((names.start.as_str(), names.number, names.count), ("a-of-b", 2, 10));
        assert_eq!(names.path(7), Path::new("x/a-of-b-00007-of-00010.gguf"));
        for wrong in ["a.gguf", "a-00003-of-00002.gguf", "a-00000-of-00002.gguf", "a-1-of-2.gguf", "a-00001-of-00002.bin", "-of-.gguf"] {
            assert_eq!(Names::of(Path::new(wrong)), None, "{wrong}");
        }
    }
}
