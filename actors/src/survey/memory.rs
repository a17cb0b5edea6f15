//! How much memory there is, and how much of it to offer.

use std::fs;
use std::path::{Path, PathBuf};

/// Memory of this machine as this process may use it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    /// All of it, in bytes; the limit of the process's control group if that is lower.
    pub total_bytes: u64,
    /// What could be used now without pushing others out, in bytes.
    pub available_bytes: u64,
}

impl Memory {
    /// Asks the operating system.
    pub fn read() -> Self {
        let refresh = sysinfo::RefreshKind::nothing().with_memory(sysinfo::MemoryRefreshKind::nothing().with_ram());
        let (total_bytes, available_bytes) = match sysinfo::System::new_with_specifics(refresh) {
            Ok(system) => (system.total_memory(), system.available_memory()),
            Err(error) => {
                tracing::warn!(%error, "the system does not say how much memory it has; none is offered");
                (0, 0)
            }
        };
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        limited(Self { total_bytes, available_bytes }, &own, Path::new("/sys/fs/cgroup"))
    }
}

/// Lowers `memory` to what the control groups of the process allow. `own` is the content of `/proc/self/cgroup`.
fn limited(mut memory: Memory, own: &str, root: &Path) -> Memory {
    let number = |path: PathBuf| fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok());
    let mut lower = |limit: Option<u64>, used: Option<u64>| {
        if let Some(limit) = limit {
            memory.total_bytes = memory.total_bytes.min(limit);
            memory.available_bytes = memory.available_bytes.min(limit.saturating_sub(used.unwrap_or(0)));
        }
    };
    for line in own.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let unified = controllers.is_empty();
        if !unified && !controllers.split(',').any(|controller| controller == "memory") {
            continue;
        }
        let root = if unified { root.to_owned() } else { root.join("memory") };
        // Every group on the way down can have a limit. In a container the path may lead out of what is mounted
        // there; what is not found limits nothing, and the container's own root is looked at in any case.
        let mut group = root.join(path.trim_start_matches('/'));
        loop {
            if unified {
                lower(number(group.join("memory.max")), number(group.join("memory.current")));
            } else {
                lower(number(group.join("memory.limit_in_bytes")), number(group.join("memory.usage_in_bytes")));
            }
            if group == root || !group.pop() {
                break;
            }
        }
    }
    memory
}

/// What a node offers for leases if its user says nothing: most of what is available, less a reserve that keeps the
/// machine usable while the model runs. In bytes.
pub fn default_offer(memory: &Memory) -> u64 {
    const RESERVE: u64 = 512 << 20;
    (memory.available_bytes / 5 * 4).saturating_sub(RESERVE)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FREE: Memory = Memory { total_bytes: 64 << 30, available_bytes: 60 << 30 };

    #[test]
    fn the_limits_of_all_groups_above_count() {
        let root = tempfile::tempdir().unwrap();
        let group = root.path().join("user.slice/shoal.service");
        fs::create_dir_all(&group).unwrap();
        fs::write(group.join("memory.max"), "max\n").unwrap();
        fs::write(root.path().join("user.slice/memory.max"), "8589934592\n").unwrap();
        fs::write(root.path().join("user.slice/memory.current"), "1073741824\n").unwrap();
        let memory = limited(FREE, "0::/user.slice/shoal.service\n", root.path());
        assert_eq!(memory, Memory { total_bytes: 8 << 30, available_bytes: 7 << 30 });
    }

    #[test]
    fn the_older_hierarchy_and_a_container_count_too() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("memory")).unwrap();
        fs::write(root.path().join("memory/memory.limit_in_bytes"), "2147483648").unwrap();
        fs::write(root.path().join("memory/memory.usage_in_bytes"), "3147483648").unwrap();
        let memory = limited(FREE, "7:cpu,memory:/docker/abc\n1:name=systemd:/x\n", root.path());
        assert_eq!(memory, Memory { total_bytes: 2 << 30, available_bytes: 0 });
    }

    #[test]
    fn no_groups_limit_nothing() {
        assert_eq!(limited(FREE, "", Path::new("/nowhere")), FREE);
        assert_eq!(limited(FREE, "nonsense\n0:\n::::\n0::/../../..\n", Path::new("/nowhere")), FREE);
    }

    #[test]
    fn the_offer_leaves_room() {
        let offer = |available_bytes| default_offer(&Memory { total_bytes: 1 << 40, available_bytes });
        assert_eq!(offer(0), 0);
        assert_eq!(offer(256 << 20), 0);
        assert!(offer(8 << 30) > 5 << 30 && offer(8 << 30) < 7 << 30);
    }
}
