//! What is printed.

/// Something beside its limit.
pub(crate) struct Row {
    pub(crate) provider: &'static str,
    pub(crate) what: &'static str,
    pub(crate) bytes: usize,
    pub(crate) limit: &'static str,
    /// Microseconds there and back, or 10⁹ bytes a second.
    pub(crate) value: f64,
    pub(crate) limit_value: f64,
}

impl Row {
    fn is_time(&self) -> bool {
        self.bytes < 1024
    }

    fn unit(&self) -> &'static str {
        if self.is_time() { "µs" } else { "GB/s" }
    }

    fn ratio(&self) -> f64 {
        self.value / self.limit_value
    }
}

pub(crate) fn print(rows: &[Row], json: bool) {
    if json {
        let rows: Vec<String> = rows
            .iter()
            .map(|row| {
                format!(
                    r#"{{"provider":"{}","what":"{}","bytes":{},"value":{:.4},"unit":"{}","limit":"{}","limit_value":{:.4},"ratio":{:.4}}}"#,
                    row.provider,
                    row.what,
                    row.bytes,
                    row.value,
                    row.unit(),
                    row.limit,
                    row.limit_value,
                    row.ratio()
                )
            })
            .collect();
        println!("{{\"rows\":[{}]}}", rows.join(","));
        return;
    }
    println!("{:<9} {:<9} {:>8} {:>15} {:>15}  {:>6}  limit", "provider", "what", "bytes", "it", "its limit", "ratio");
    for row in rows {
        let unit = row.unit();
        println!(
            "{:<9} {:<9} {:>8} {:>10.3} {unit:<4} {:>10.3} {unit:<4}  {:>6.2}  {}",
            row.provider,
            row.what,
            row.bytes,
            row.value,
            row.limit_value,
            row.ratio(),
            row.limit
        );
    }
}
