//! Dates for templates that tell the model what day it is. The moment is given by whoever asks; there is no clock.

/// Days of the week from Monday.
const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
const MONTHS: [&str; 12] =
    ["January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December"];

/// A moment in UTC by its parts.
struct Parts {
    year: i64,
    /// From 1.
    month: i64,
    /// From 1.
    day: i64,
    /// From Monday, 0.
    weekday: i64,
    /// From 1.
    day_of_year: i64,
    second_of_day: i64,
}

/// The calendar of `unix_seconds`. Howard Hinnant's "chrono-compatible low-level date algorithms".
fn parts(unix_seconds: i64) -> Parts {
    let days = unix_seconds.div_euclid(86_400);
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_from_march = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_from_march + 2) / 153;
    let day = day_from_march - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let before: i64 = (1..month).map(|m| [31, 28 + i64::from(leap), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31][m as usize - 1]).sum();
    Parts { year, month, day, weekday: (days + 3).rem_euclid(7), day_of_year: before + day, second_of_day: unix_seconds.rem_euclid(86_400) }
}

/// Formats a moment in UTC as `strftime` does in the C locale. Unknown directives stay as they are.
pub(crate) fn strftime(unix_seconds: i64, format: &str) -> String {
    // Beyond these the calendar's arithmetic has no meaning; the years are about ±290 million.
    let at = parts(unix_seconds.clamp(-9_000_000_000_000_000, 9_000_000_000_000_000));
    let (hour, minute, second) = (at.second_of_day / 3600, at.second_of_day / 60 % 60, at.second_of_day % 60);
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
    let mut out = String::new();
    let mut characters = format.chars().peekable();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let unpadded = characters.next_if_eq(&'-').is_some();
        let number = |value: i64, width: usize| if unpadded { value.to_string() } else { format!("{value:0width$}") };
        let text = match characters.next() {
            Some('Y') => number(at.year, 4),
            Some('y') => number(at.year.rem_euclid(100), 2),
            Some('m') => number(at.month, 2),
            Some('d') => number(at.day, 2),
            Some('e') if unpadded => at.day.to_string(),
            Some('e') => format!("{:2}", at.day),
            Some('j') => number(at.day_of_year, 3),
            Some('H') => number(hour, 2),
            Some('I') => number(hour12, 2),
            Some('M') => number(minute, 2),
            Some('S') => number(second, 2),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('A') => DAYS[at.weekday as usize].to_owned(),
            Some('a') => DAYS[at.weekday as usize][..3].to_owned(),
            Some('B') => MONTHS[at.month as usize - 1].to_owned(),
            Some('b' | 'h') => MONTHS[at.month as usize - 1][..3].to_owned(),
            Some('F') => format!("{:04}-{:02}-{:02}", at.year, at.month, at.day),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('R') => format!("{hour:02}:{minute:02}"),
            Some('D') => format!("{:02}/{:02}/{:02}", at.month, at.day, at.year.rem_euclid(100)),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('n') => "\n".to_owned(),
            Some('t') => "\t".to_owned(),
            Some('%') => "%".to_owned(),
            Some(other) => format!("%{}{other}", if unpadded { "-" } else { "" }),
            None => "%".to_owned(),
        };
        out.push_str(&text);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_moments() {
        assert_eq!(strftime(0, "%A %d %B %Y, %H:%M:%S"), "Thursday 01 January 1970, 00:00:00");
        assert_eq!(strftime(1_709_210_096, "%F %T %j %a"), "2024-02-29 12:34:56 060 Thu");
        assert_eq!(strftime(1_735_689_599, "%d %b %Y %I:%M %p"), "31 Dec 2024 11:59 PM");
        assert_eq!(strftime(-1, "%F %T"), "1969-12-31 23:59:59");
        assert_eq!(strftime(1_709_210_096, "%-d.%-m.%y|%e|%%|%q|%"), "29.2.24|29|%|%q|%");
    }

    #[test]
    fn any_moment_has_a_date() {
        for seconds in [i64::MIN, i64::MAX, -62_135_596_800, 253_402_300_799] {
            assert!(!strftime(seconds, "%A %B %j %F").is_empty());
        }
    }
}
