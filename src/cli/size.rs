//! Sizes of memory, read and written.

/// Reads `4GiB`, `512 MB`, `2g`, `1000000`. Units of 1024 are KiB, MiB, GiB and TiB, and single letters; units of 1000
/// are kB, MB, GB and TB.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "t" | "tib" => 1 << 40,
        _ => return Err(format!("`{text}` is no size: write it like 4GiB or 500MB")),
    };
    let number: f64 = number.parse().map_err(|_| format!("`{text}` is no size: write it like 4GiB or 500MB"))?;
    let bytes = number * unit as f64;
    // Every machine's memory is far below this.
    if (1.0..=1e18).contains(&bytes) { Ok(bytes as u64) } else { Err(format!("`{text}` is no size that a machine can have")) }
}

/// `bytes` with three digits, e.g. `97.3 MB`.
pub(crate) fn size_text(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if bytes < 1000 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1e3;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1e3;
        unit += 1;
    }
    let digits = if value < 9.995 { 2 } else { usize::from(value < 99.95) };
    format!("{value:.digits$} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read() {
        for (text, bytes) in
            [("4GiB", 4 << 30), ("4g", 4 << 30), ("1.5 GiB", 3 << 29), ("500MB", 500_000_000), ("123", 123), (" 2 kb ", 2000)]
        {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "GiB", "0", "-1", "4 gibs", "1e9", "1..2", "99999999TB", "NaN"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_written() {
        assert_eq!(
            (size_text(5), size_text(98_362_432), size_text(4 << 30)),
            ("5 B".to_owned(), "98.4 MB".to_owned(), "4.29 GB".to_owned())
        );
    }
}
