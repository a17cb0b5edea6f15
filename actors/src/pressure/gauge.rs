//! How much memory the machine has left, and how much of it this process holds.

use std::fmt;

use crate::survey::Memory;

/// Memory at a moment, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// All that the machine, or the control group of the process, has.
    pub total_bytes: u64,
    /// What could be used now without pushing others out.
    pub available_bytes: u64,
    /// What this process holds that could only go to swap, files that it reads not counted; `None` where the system does not say.
    pub resident_bytes: Option<u64>,
}

/// Tells how much memory there is. It is asked twice a second, and must not block.
pub trait MemoryGauge: fmt::Debug + Send + Sync {
    /// What it is now; `None` if that cannot be told.
    fn read(&self) -> Option<Reading>;
}

/// The machine's own word.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemGauge;

impl MemoryGauge for SystemGauge {
    fn read(&self) -> Option<Reading> {
        let Memory { total_bytes, available_bytes } = Memory::read();
        let resident_bytes = std::fs::read_to_string("/proc/self/status").ok().and_then(|status| resident(&status));
        (total_bytes > 0).then_some(Reading { total_bytes, available_bytes, resident_bytes })
    }
}

/// Anonymous and shared memory of a process in RAM, by its `/proc/PID/status` (proc_pid_status(5)).
fn resident(status: &str) -> Option<u64> {
    let kib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    kib("RssAnon")?.checked_add(kib("RssShmem")?)?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_do_not_count() {
        let status = "VmRSS:\t    5000 kB\nRssAnon:\t    1200 kB\nRssFile:\t    3000 kB\nRssShmem:\t     800 kB\n";
        assert_eq!(resident(status), Some(2000 * 1024));
        assert_eq!(resident("VmRSS:\t 5000 kB\n"), None, "an old kernel");
        assert_eq!(resident("RssAnon:\t x kB\nRssShmem:\t 1 kB\n"), None);
    }

    #[test]
    fn this_machine_says_something() {
        let reading = SystemGauge.read().expect("a reading");
        assert!(reading.available_bytes <= reading.total_bytes, "{reading:?}");
        if cfg!(target_os = "linux") {
            let before = reading.resident_bytes.expect("Linux says");
            let more = vec![1u8; 64 << 20];
            let after = SystemGauge.read().and_then(|reading| reading.resident_bytes).expect("still");
            assert!(after >= before + (32 << 20), "{before} {after}");
            drop(more);
        }
    }
}
