//! Sizes of memory in words.

/// `bytes` with three digits and a decimal unit, e.g. `97.3 MB`.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if bytes < 1000 {
        return format!("{bytes} bytes");
    }
    let mut value = bytes as f64 / 1e3;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1e3;
        unit += 1;
    }
    let digits = if value < 9.995 {
        2
    } else if value < 99.95 {
        1
    } else {
        0
    };
    format!("{value:.digits$} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_read_well() {
        assert_eq!(size(0), "0 bytes");
        assert_eq!(size(999), "999 bytes");
        assert_eq!(size(1000), "1.00 kB");
        assert_eq!(size(97_312_000), "97.3 MB");
        assert_eq!(size(999_600), "1.00 MB");
        assert_eq!(size(8_589_934_592), "8.59 GB");
        assert_eq!(size(u64::MAX), "18447 PB");
    }
}
