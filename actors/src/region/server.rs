//! The owner's threads, one for each lease that is reached from afar.

use shoal_transport::channel::ChannelOptions;
use shoal_transport::frame::Fence;
use shoal_transport::provider::AcceptError;
use shoal_transport::remote::RegionServer;

use super::service::{RegionMemory, RegionOffer, RegionRefusal, RegionRequest};
use super::table::Regions;
use crate::ids::NodeId;
use crate::lease::Leases;
use crate::places::Places;
use crate::service::Inbound;
use crate::stage::links::TensorLinks;

/// Links that a node serves leased memory on at a time.
const SERVED_MAX: usize = 256;
/// Shortest and longest message, in bytes.
const SLOT_LEAST: u32 = 4096;
const SLOT_MOST: u32 = 4 * 1024 * 1024;
/// Messages under way at a time.
const SLOTS: u16 = 8;

/// How messages of leased memory travel.
pub(super) fn channel_options(slot_bytes: u32) -> ChannelOptions {
    ChannelOptions { slot_bytes, slots: SLOTS }
}

/// Lets holders in.
#[derive(Debug, Clone)]
pub struct RegionServers {
    regions: Regions,
    leases: Leases,
    links: TensorLinks,
    served: Places,
}

impl RegionServers {
    /// Serves the memory of `regions` over `links` to whom `leases` lends it.
    pub fn new(regions: Regions, leases: Leases, links: TensorLinks) -> Self {
        Self { regions, leases, links, served: Places::new(SERVED_MAX) }
    }

    /// Takes one request. Does not wait.
    pub fn answer(&self, call: Inbound<RegionMemory>) {
        let outcome = self.offer(call.from, &call.request);
        if let Some(reply) = call.reply {
            reply.reply(outcome);
        }
    }

    fn offer(&self, from: NodeId, request: &RegionRequest) -> Result<RegionOffer, RegionRefusal> {
        let RegionRequest { right, slot_bytes } = request;
        let (lease, slot_bytes) = (right.lease, *slot_bytes);
        if !(SLOT_LEAST..=SLOT_MOST).contains(&slot_bytes) {
            return Err(RegionRefusal::Slot { least: SLOT_LEAST, most: SLOT_MOST });
        }
        let place = self.served.take().ok_or(RegionRefusal::Busy(SERVED_MAX))?;
        let (table, handle) = self.regions.reach(from, right, &|from, right| self.leases.check(from, right))?;
        let (effects, regions) = (self.links.effects().clone(), self.regions.clone());
        let serve = move |link: Result<_, AcceptError>| {
            let _place = place;
            let link = match link {
                Ok(link) => link,
                Err(error) => return tracing::debug!(target: "shoal::region", %error, "nobody came for leased memory"),
            };
            let opened = RegionServer::open(link, Fence::default(), channel_options(slot_bytes), from.0, table, &effects);
            match opened {
                Ok(server) if regions.serve(lease, handle, server.closer()) => {
                    let end = server.run();
                    tracing::debug!(target: "shoal::region", ?lease, %end, "a link to leased memory ended");
                }
                Ok(server) => server.closer().close(),
                Err(error) => tracing::debug!(target: "shoal::region", %error, "a link to leased memory did not open"),
            }
        };
        let (endpoints, ticket) = self.links.serve_link(from, slot_bytes, "shoal-region", serve).map_err(RegionRefusal::Failed)?;
        Ok(RegionOffer { endpoints, ticket, handle })
    }
}
